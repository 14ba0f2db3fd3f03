"""The three models of a checkpoint, in pure JAX."""
