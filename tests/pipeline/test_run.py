"""Renders with the real model, stitch and store; only Ray stands in this process."""

import contextlib
import hashlib
import io
import json
import os
import signal
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import yaml
from rich.console import Console

from pipeline import lease, names, rendering, run
from pipeline.batch import Batch
from pipeline.errors import RequestError
from pipeline.manifest import load_manifest
from pipeline.plan import make_plan
from pipeline.status import retry
from pipeline.stitch import stitch_batch
from pipeline.stitcher import Stitcher
from tests.tiny_model import write_tiny_model
from workers.fleet import HostDied
from workers.host import Host

ROOT = Path(__file__).parents[2]
MANIFEST = """version: 1
batch: spring
model: {model}
output: {output}
defaults: {{size: 62x60, frames: 6, steps: 4, guidance: 3.0}}
attention: {{density: 0.8, dense_steps: 0.25, tolerance: 10, tile: 16x16}}
clips:
  - {{id: one, prompt: "a red circle", seed: 1}}
  - {{id: two, prompt: "red a circle", seed: 2}}
"""


class Hosts:
    """Stands where Ray does: slices whose host is in this process.

    Attributes:
        calls: (clip, method) of every call to a slice.
        before: Called with these before each call; may raise `HostDied`.
    """

    def __init__(self):
        self.calls = []
        self.before = lambda clip, method: None
        self._loaded = {}

    @contextlib.contextmanager
    def fleet(self):
        yield

    def new_slice(self, name):
        return HereSlice(self, name)

    def load(self, model):
        if model not in self._loaded:
            host = Host()
            self._loaded[model] = host, host.load(model)
        return self._loaded[model]


class HereSlice:
    def __init__(self, hosts, name):
        self.name = name
        self._hosts = hosts
        self._host = None
        self._clip = ""

    def call(self, method, *args):
        if method in ("encode", "begin", "resume"):
            self._clip = args[0].clip
        self._hosts.calls.append((self._clip, method))
        self._hosts.before(self._clip, method)
        if method == "load":
            self._host, engine = self._hosts.load(*args)
            return engine
        return getattr(self._host, method)(*args)

    def close(self):
        self._host = None


class HereHelper(contextlib.nullcontext):
    """Stands where the process that stitches does, so that Beam is imported once."""

    def __init__(self, batch_uri):
        super().__init__()
        self._batch_uri = batch_uri

    def stitch(self, clip):
        stitch_batch(self._batch_uri, [clip])
        return ""

    def kill(self):
        """Nothing: this stitch cannot be ended half-way."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def all_hosts():
    return Hosts()


@pytest.fixture
def hosts(all_hosts, monkeypatch):
    all_hosts.calls.clear()
    all_hosts.before = lambda clip, method: None
    monkeypatch.setattr("pipeline.stitcher._Helper", HereHelper)
    monkeypatch.setattr("pipeline.run.fleet.fleet", all_hosts.fleet)
    monkeypatch.setattr("pipeline.run.fleet.new_slice", all_hosts.new_slice)
    return all_hosts


@pytest.fixture
def manifest(tmp_path, model):
    path = tmp_path / "spring.yaml"
    path.write_text(MANIFEST.format(model=model, output=tmp_path / "renders"))
    return path


@pytest.fixture
def root(tmp_path):
    return str(tmp_path / "renders" / "spring")


@pytest.fixture
def render(hosts, manifest):
    """Renders the manifest; returns the exit status and what was shown."""

    def run_it(**console):
        shown = io.StringIO()
        console = Console(file=shown, width=200, **console)
        plan = make_plan(load_manifest(manifest), folder=manifest.parent)
        return run.render(plan, console=console), shown.getvalue()

    return run_it


def checkpoint_each_step(monkeypatch):
    monkeypatch.setattr(rendering, "CALL_SECONDS", 0.0)
    monkeypatch.setattr(rendering, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(rendering, "CHECKPOINT_SHARE", float("inf"))


def states(root):
    batch = Batch.open(root)
    return [batch.log.status(clip.job.clip).state for clip in batch.clips]


def frames(root, clip):
    """Digests of a clip's frames, in order."""
    batch = Batch.open(root)
    (shard,) = batch.log.status(clip).shards
    folder = shard.rpartition("/")[0]
    found = [n for n in batch.store.list(folder) if n.endswith(".png")]
    return [hashlib.sha256(batch.store.read(name)).hexdigest() for name in found]


def test_a_batch_is_rendered_stitched_and_shown(render, root, hosts):
    code, shown = render()
    assert (code, states(root)) == (0, ["stitched", "stitched"])
    assert "spring: 2 of 2 clips done" in shown
    assert shown.rstrip().endswith(f"Report: {root}/index.html")
    store = Batch.open(root).store
    for clip in ("one", "two"):
        for name in (names.video(clip), names.provenance(clip), names.sheet(clip)):
            assert store.read(name)
        assert store.list(names.checkpoints(clip)) == []
        assert store.read(names.text(clip))
    assert [m for _, m in hosts.calls].count("load") == 1


def test_a_finished_batch_is_left_alone_and_ray_not_started(render, root, hosts):
    render()
    hosts.calls.clear()
    store = Batch.open(root).store
    before = {n: store.read(n) for n in store.list("") if not n.startswith("lease/")}
    code, shown = render()
    after = {n: store.read(n) for n in store.list("") if not n.startswith("lease/")}
    assert (code, hosts.calls, after) == (0, [], before)
    assert "2 of 2 clips done" in shown


def test_the_same_manifest_gives_the_same_frames_twice(render, root, tmp_path):
    render()
    first = frames(root, "one"), frames(root, "two")
    (tmp_path / "renders").rename(tmp_path / "before")
    render()
    assert (frames(root, "one"), frames(root, "two")) == first
    assert first[0] != first[1]


def test_a_batch_that_was_moved_is_gone_on_with(render, root, tmp_path, hosts):
    def die(clip, method):
        if (clip, method) == ("two", "advance"):
            raise KeyboardInterrupt

    hosts.before = die
    assert render()[0] == 130
    (tmp_path / "renders").rename(tmp_path / "elsewhere")
    (tmp_path / "renders").symlink_to(tmp_path / "elsewhere")
    hosts.before = lambda clip, method: None
    assert render()[0] == 0


def test_a_killed_host_is_started_again_and_the_clip_goes_on(
    render, root, hosts, monkeypatch
):
    checkpoint_each_step(monkeypatch)
    deaths = []

    def die(clip, method):
        done = [c for c in hosts.calls if c == ("one", "advance")]
        if clip == "one" and len(done) == 3 and method == "advance" and not deaths:
            deaths.append(1)
            raise HostDied("the host's process died")

    hosts.before = die
    code, shown = render()
    assert (code, states(root)) == (0, ["stitched", "stitched"])
    assert "one: the host's process died; starting it again" in shown
    events = Batch.open(root).log.events("one")
    assert [e.data["resumed_from"] for e in events if e.event == "started"] == [0, 2]


def test_a_clip_whose_host_dies_each_time_is_given_up_and_the_others_finish(
    render, root, hosts
):
    def die(clip, method):
        if clip == "one" and method == "advance":
            raise HostDied("the host's process died")

    hosts.before = die
    code, shown = render()
    assert (code, states(root)) == (1, ["failed", "stitched"])
    tries = [c for c in hosts.calls if c == ("one", "advance")]
    assert len(tries) == run.MAX_ATTEMPTS
    assert "one failed in denoise: the host's process died (3 times" in shown
    assert "Render the manifest again to go on." in shown
    # It was no fault of the clip for sure: the next run tries again.
    hosts.before = lambda clip, method: None
    assert render()[0] == 0


def test_a_preemption_is_no_attempt(render, hosts):
    deaths = []

    def die(clip, method):
        if clip == "one" and method == "advance" and len(deaths) < 5:
            deaths.append(1)
            raise HostDied("the host was preempted", preempted=True)

    hosts.before = die
    assert render()[0] == 0
    assert len(deaths) == 5


def test_a_model_that_kills_its_host_stops_the_run(render, root, hosts):
    def die(clip, method):
        if method == "load":
            raise HostDied("the host's process was ended for want of memory")

    hosts.before = die
    code, shown = render()
    assert code == 1
    assert "died 3 times while loading the model" in shown
    assert states(root) == ["queued", "queued"]


def test_latents_that_are_not_finite_fail_the_clip_once_and_for_good(
    render, root, hosts, manifest, tmp_path
):
    broken = write_tiny_model(tmp_path / "broken", seed=3)
    weights = broken / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = safetensors.numpy.load_file(weights)
    tensors["proj_out.bias"][:] = np.inf
    safetensors.numpy.save_file(tensors, weights)
    manifest.write_text(MANIFEST.format(model=broken, output=tmp_path / "renders"))
    code, shown = render()
    assert (code, states(root)) == (1, ["failed", "failed"])
    assert "one failed in denoise: the latents are not finite after step 1" in shown
    assert [c for c in hosts.calls if c[1] == "advance"] == [
        ("one", "advance"),
        ("two", "advance"),
    ]
    assert f"tilereel retry {root}" in shown
    hosts.calls.clear()
    assert render()[0] == 1
    assert hosts.calls == []
    retry(root, clip="one", console=Console(quiet=True))
    assert render()[0] == 1
    assert {clip for clip, _ in hosts.calls if clip} == {"one"}


def test_a_model_that_is_not_whole_is_refused_before_any_clip(
    render, root, hosts, manifest, tmp_path
):
    broken = write_tiny_model(tmp_path / "broken")
    weights = broken / "vae" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    manifest.write_text(MANIFEST.format(model=broken, output=tmp_path / "renders"))
    with pytest.raises(RequestError, match=r"does not load: .*vae.*safetensors"):
        render()
    assert states(root) == ["queued", "queued"]


def test_a_model_that_changed_meanwhile_is_refused(
    render, root, hosts, manifest, tmp_path
):
    home = write_tiny_model(tmp_path / "own")
    manifest.write_text(MANIFEST.format(model=home, output=tmp_path / "renders"))

    def stop(clip, method):
        if clip == "one" and method == "advance":
            raise KeyboardInterrupt

    hosts.before = stop
    assert render()[0] == 130
    hosts.before = lambda clip, method: None
    hosts._loaded.pop(str(home))
    home.rename(tmp_path / "old")
    write_tiny_model(home, seed=5)
    with pytest.raises(RequestError, match="has changed: clip one was begun with"):
        render()


def test_a_changed_manifest_is_refused_with_the_difference(render, manifest, root):
    render()
    before = os.stat(os.path.join(root, names.BATCH)).st_mtime_ns
    text = manifest.read_text()
    manifest.write_text(text.replace("seed: 2", "seed: 3").replace("a red", "the red"))
    with pytest.raises(RequestError) as caught:
        render()
    message = str(caught.value)
    assert 'clips.one.prompt: "a red circle" -> "the red circle"' in message
    assert "clips.two.seed: 2 -> 3" in message
    assert message.count(" -> ") == 3
    manifest.write_text(text.replace("  - {id: two", "  - {id: too"))
    with pytest.raises(RequestError, match=r"clips\.two: gone\n  clips\.too: new\n"):
        render()
    assert os.stat(os.path.join(root, names.BATCH)).st_mtime_ns == before
    # The order of the clips is not theirs.
    lines = text.splitlines()
    manifest.write_text("\n".join([*lines[:-2], lines[-1], lines[-2]]))
    assert render()[0] == 0


def test_a_batch_begun_before_there_were_tiles_goes_on_dense_and_not_otherwise(
    render, root, manifest, hosts
):
    text = manifest.read_text()
    dense = text.replace("attention: {", "attention: {kinds: dense, ")
    manifest.write_text(dense)
    render()
    store = Batch.open(root).store
    info = json.loads(store.read(names.BATCH))
    info["manifest"]["attention"] = {"kinds": "dense"}
    for clip in info["clips"]:
        del clip["job"]["attention"]
    store.replace(names.BATCH, json.dumps(info | {"hash": "0"}).encode())
    hosts.calls.clear()
    assert (render()[0], hosts.calls) == (0, [])
    manifest.write_text(text)
    with pytest.raises(RequestError) as caught:
        render()
    assert "clips.one.attention: null -> {" in str(caught.value)
    assert "`attention: {kinds: dense}` goes on with it" in str(caught.value)


def test_a_second_driver_is_told_and_changes_nothing(render, root, hosts):
    told = []

    def second(clip, method):
        if method == "advance" and not told:
            try:
                lease.take(Batch.open(root).store)
            except lease.LeaseHeld as error:
                told.append(str(error))

    hosts.before = second
    assert render()[0] == 0
    assert f"process {os.getpid()} on" in told[0]


def test_a_driver_whose_batch_is_taken_over_stops(render, root, hosts, monkeypatch):
    monkeypatch.setattr(lease, "HEARTBEAT_SECONDS", 0.01)

    def take_over(clip, method):
        if method == "advance":
            store = Batch.open(root).store
            store.create(names.lease(2), store.read(names.lease(1)))
            for thread in threading.enumerate():
                if thread.name == "lease-heartbeat":
                    thread.join(10)

    hosts.before = take_over
    code, shown = render()
    assert code == 1
    assert "Stopped: another driver has taken the batch over" in shown
    # It left the lease and the clips to the other.
    assert Batch.open(root).log.status("one").step == 0
    assert lease.current_epoch(Batch.open(root).store) == 2


@pytest.mark.parametrize("damage", ["deleted", "cut short"])
def test_a_frame_damaged_before_the_stitch_is_named_and_made_anew_by_the_next_run(
    render, root, hosts, damage, monkeypatch
):
    frame = names.frame("one", 1, 0, 3)
    stitch = Stitcher.stitch

    def harm_then_stitch(self, clip):
        store = Batch.open(root).store
        if clip == "one" and frame in store.list(frame):
            if damage == "deleted":
                store.delete(frame)
            else:
                store.replace(frame, store.read(frame)[:-20])
        stitch(self, clip)

    monkeypatch.setattr(Stitcher, "stitch", harm_then_stitch)
    code, shown = render()
    assert (code, states(root)) == (1, ["failed", "stitched"])
    assert "one failed in stitch: frame 3 " in shown
    monkeypatch.setattr(Stitcher, "stitch", stitch)
    hosts.calls.clear()
    code, _ = render()
    assert (code, states(root)) == (0, ["stitched", "stitched"])
    methods = [method for clip, method in hosts.calls if clip == "one"]
    assert methods[0] == "resume" and "advance" not in methods
    assert {clip for clip, _ in hosts.calls if clip} == {"one"}


def test_a_clip_put_back_while_the_last_videos_are_made_is_rendered_in_this_run(
    render, root, hosts, monkeypatch
):
    def break_one(clip, method):
        if (clip, method) == ("one", "advance"):
            raise ValueError("broken")

    finish = Stitcher.finish

    def finish_then_retry(self):
        finish(self)
        if states(root)[0] == "failed":
            hosts.before = lambda clip, method: None
            retry(root, clip="one", console=Console(quiet=True))

    hosts.before = break_one
    monkeypatch.setattr(Stitcher, "finish", finish_then_retry)
    assert (render()[0], states(root)) == (0, ["stitched", "stitched"])
    events = [event.event for event in Batch.open(root).log.events("one")]
    assert events.count("failed") == events.count("retried") == 1


def test_a_deleted_video_is_made_again_from_its_frames(render, root, hosts):
    render()
    store = Batch.open(root).store
    video = store.read(names.video("two"))
    store.delete(names.video("two"))
    hosts.calls.clear()
    assert render()[0] == 0
    assert store.read(names.video("two")) == video
    assert hosts.calls == []


def test_an_interrupt_says_how_to_go_on_and_the_next_run_does(
    render, root, hosts, monkeypatch
):
    checkpoint_each_step(monkeypatch)

    def stop(clip, method):
        if clip == "two" and len(hosts.calls) > 20 and method == "advance":
            hosts.before = lambda clip, method: None
            os.kill(os.getpid(), signal.SIGTERM)

    hosts.before = stop
    code, shown = render()
    assert code == 130
    assert "run the same command again to go on from there" in shown
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert render()[0] == 0
    events = Batch.open(root).log.events("one")
    assert {e.epoch for e in events if e.event != "stitched"} == {1}


def test_an_output_that_cannot_be_written_is_refused(render, manifest, model, tmp_path):
    (tmp_path / "file").write_text("")
    manifest.write_text(MANIFEST.format(model=model, output=tmp_path / "file"))
    with pytest.raises(RequestError, match=r"batch\.json cannot be written"):
        render()


@pytest.fixture
def tiny_disk(tmp_path):
    """A disk of 300 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "none", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this user may not mount a disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_ends_the_clip_with_its_reason_and_room_mends_it(
    render, root, manifest, model, tiny_disk
):
    text = MANIFEST.format(model=model, output=tiny_disk)
    manifest.write_text(text.replace("frames: 6", "frames: 60"))
    root = str(tiny_disk / "spring")
    code, shown = render()
    assert code == 1
    assert "No space left on device; free some space" in shown
    hidden = [f for _, _, files in os.walk(root) for f in files if f[0] == "."]
    assert hidden == []
    subprocess.run(["mount", "-o", "remount,size=8m", str(tiny_disk)], check=True)
    code, shown = render()
    assert (code, states(root)) == (0, ["stitched", "stitched"])


def test_on_a_terminal_there_are_bars_and_the_table_at_the_end(render):
    code, shown = render(force_terminal=True)
    assert code == 0
    # Bars are drawn ten times a second: which steps they show is chance.
    assert "of 2 clips" in shown
    assert "one: done, 6 frames" in shown


def test_the_demo_batch_skips_tiles_and_says_so(hosts, tmp_path):
    # Its first clip, shorter and in fewer steps, for the test's time.
    example = yaml.safe_load((ROOT / "configs" / "manifests" / "demo.yaml").read_text())
    example["defaults"] |= {"frames": 49, "steps": 6}
    example["clips"] = example["clips"][:1]
    path = tmp_path / "demo.yaml"
    path.write_text(yaml.safe_dump(example))
    plan = make_plan(load_manifest(path), str(tmp_path))
    assert run.render(plan, console=Console(file=io.StringIO())) == 0
    heads = Batch.open(f"{tmp_path}/demo").log.status("circle").attention
    assert heads is not None and heads.tiles < heads.all_tiles
    page = (tmp_path / "demo" / "index.html").read_text()
    skipped = f"({heads.all_tiles - heads.tiles:,} of {heads.all_tiles:,})"
    assert f"of tiles skipped {skipped}; heads: " in page
