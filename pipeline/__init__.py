"""What a user drives: manifest, plan, run, status, stitch, report, command line."""
