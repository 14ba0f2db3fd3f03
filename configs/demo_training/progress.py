"""Checkpoints of a training run: written beside and moved, so never half there."""

import os
from pathlib import Path
from typing import Any

import torch


class Progress:
    """The state of everything with a `state_dict`, in one file."""

    def __init__(self, path: Path, **parts: Any):
        self.path, self.parts = path, parts

    def load(self) -> int:
        """Restores all parts and returns the number of steps done; 0 for a new run."""
        if not self.path.exists():
            return 0
        saved = torch.load(self.path, weights_only=True)
        for name, part in self.parts.items():
            part.load_state_dict(saved[name])
        return saved["step"]

    def save(self, step: int) -> None:
        """Stores all parts after `step` steps."""
        beside = self.path.with_suffix(".new")
        states = {name: part.state_dict() for name, part in self.parts.items()}
        torch.save({"step": step, **states}, beside)
        os.replace(beside, self.path)
