"""One Ray for all tests, in a process of its own, for whom to render with."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

# Ray's own objects, which warn when they are collected, stay out of the tests' process.
_START = """
import json, os, sys
from workers.fleet import fleet
with fleet():
    import ray
    address = ray.get_runtime_context().gcs_address
    known = {"RAY_ADDRESS": address, "RAY_AUTH_MODE": os.environ["RAY_AUTH_MODE"],
             "RAY_AUTH_TOKEN": os.environ["RAY_AUTH_TOKEN"]}
    print(json.dumps(known), flush=True)
    sys.stdin.read()
"""


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A Ray cluster on this machine.

    Attributes:
        environment: What makes a process connect to it.
        pid: The process that all of the cluster's descend from.
    """

    environment: dict[str, str]
    pid: int


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Ray that tests share; its actors keep what they compile for the next ones."""
    compiled = tmp_path_factory.mktemp("compiled")
    with subprocess.Popen(
        [sys.executable, "-c", _START],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ
        | {
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(compiled),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        },
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        environment = json.loads(process.stdout.readline())
        yield Cluster(environment, process.pid)
        process.stdin.close()
