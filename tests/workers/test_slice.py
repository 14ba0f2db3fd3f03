"""A slice whose cluster is dying; only Ray's own answers are made up."""

from typing import Any

import pytest

from workers.fleet import FleetError, HostDied, Slice, new_slice


class Dying:
    """Stands for an actor, or any function of Ray, that fails when called."""

    def __init__(self, error):
        self.call = self
        self.error = error

    def remote(self, *args, **options):
        raise self.error

    __call__ = remote


@pytest.fixture
def ray():
    """Ray, imported late: it reads how to authenticate when it is imported."""
    return pytest.importorskip("ray")


def a_slice(error):
    slice_: Any = object.__new__(Slice)
    slice_._hosts = [Dying(error), Dying(error)]
    slice_._group = None
    return slice_


def test_a_failing_cluster_is_no_fault_of_a_clip(ray, monkeypatch):
    from ray.exceptions import ActorDiedError, RaySystemError

    with pytest.raises(FleetError, match=r"cluster fails: .*raylet is gone"):
        a_slice(RaySystemError("the raylet is gone")).call("advance", 1)
    with pytest.raises(HostDied):
        a_slice(ActorDiedError()).call("advance", 1)
    gone = Dying(RaySystemError("the raylet is gone"))
    monkeypatch.setattr(ray.util, "placement_group", gone)
    with pytest.raises(FleetError, match=r"cluster fails: .*raylet is gone"):
        new_slice("slice-0")


def test_a_slice_of_a_cluster_that_is_gone_closes_in_silence(ray, monkeypatch):
    from ray.exceptions import RaySystemError

    gone = Dying(RaySystemError("the raylet is gone"))
    monkeypatch.setattr(ray, "kill", gone)
    monkeypatch.setattr(ray.util, "remove_placement_group", gone)
    a_slice(None).close()
