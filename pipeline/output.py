"""Where a host puts what it makes of one clip: the store, under the batch's names."""

import dataclasses

from pipeline import names
from pipeline.store import Missing, Store, checksum, open_store
from workers.output import Written


@dataclasses.dataclass(frozen=True)
class StoreOutput:
    """The `workers.output.ClipOutput` that writes to a batch's store.

    Holds no open store, so that it travels to the host's process as it is. All
    methods raise `pipeline.store.StoreError`.

    Attributes:
        batch: The batch's root, as `pipeline.store.open_store` takes it.
        clip: The clip's id.
        epoch: The driver's epoch; frames go to a folder of their own for each.
    """

    batch: str
    clip: str
    epoch: int

    def read_text(self) -> bytes | None:
        """Returns the clip's text embeddings, None where there are none yet."""
        try:
            return self._store.read(names.text(self.clip))
        except Missing:
            return None

    def write_text(self, data: bytes) -> Written:
        """Stores the clip's text embeddings, over those that may be there."""
        name = names.text(self.clip)
        self._store.replace(name, data)
        return _written(name, data)

    def read_checkpoint(self, step: int) -> bytes:
        """Returns the clip's state after `step` steps."""
        return self._store.read(names.checkpoint(self.clip, step))

    def write_checkpoint(self, step: int, data: bytes) -> Written:
        """Stores the clip's state after `step` steps, over an older epoch's."""
        name = names.checkpoint(self.clip, step)
        self._store.replace(name, data)
        return _written(name, data)

    def clear_shard(self, number: int) -> None:
        """Removes what an earlier attempt of this epoch has left of a shard."""
        store = self._store
        # What says that the shard is whole goes first.
        store.delete(names.shard_json(self.clip, self.epoch, number))
        for name in store.list(names.shard(self.clip, self.epoch, number)):
            store.delete(name)

    def write_frame(self, number: int, index: int, data: bytes) -> Written:
        """Stores a frame of a shard; `index` counts in the clip, from 0."""
        name = names.frame(self.clip, self.epoch, number, index)
        self._store.create(name, data)
        return _written(name, data)

    def write_shard(self, number: int, data: bytes) -> Written:
        """Stores what a shard holds; after this, the shard counts as whole."""
        name = names.shard_json(self.clip, self.epoch, number)
        self._store.create(name, data)
        return _written(name, data)

    @property
    def _store(self) -> Store:
        return open_store(self.batch)


def _written(name: str, data: bytes) -> Written:
    return Written(name, len(data), checksum(data))
