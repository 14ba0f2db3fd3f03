"""Figures that one machine can give: what `tilereel bench` measures."""
