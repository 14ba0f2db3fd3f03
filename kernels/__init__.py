"""Attention, and everything that decides which of its tiles are computed."""
