"""What runs on the hosts of a slice."""
