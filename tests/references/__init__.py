"""Outputs of the reference software on random weights, and what made them."""
