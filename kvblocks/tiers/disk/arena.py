"""`Arena`: the file of a store's slots. A slot holds a block's record, zeros up to a page's end, and its payload.

A slot is written in place, so a crash can leave it half written. Its record shows that, and whose bytes the slot holds.
"""

import errno
import os
from collections.abc import Iterable

from kvblocks.tiers.disk.folder import flush
from kvblocks.tiers.disk.layout import Layout
from kvblocks.tiers.identity import BlockIdentity
from kvblocks.tiers.sealing import Sealer

_MOST_ZEROS = 2**20  # bytes that are written at once
_MOST_UNFLUSHED = 2**30  # bytes that are overwritten between two flushes


class Arena:
    """Slots in an open file, which `close` closes. Every call may raise OSError, unless its docstring says otherwise.

    Calls for different slots may run at the same time.
    """

    def __init__(self, descriptor: int, layout: Layout, sealer: Sealer) -> None:
        self.descriptor = descriptor
        self._layout = layout
        self._sealer = sealer
        self._is_blank = bytearray(layout.num_slots)  # by slot: 1 if it was erased and not written since
        if os.fstat(descriptor).st_size > layout.offset(layout.num_slots):
            os.ftruncate(descriptor, layout.offset(layout.num_slots))

    def write(self, slot: int, identity: BlockIdentity, payload: memoryview) -> None:
        """Write a block. O(its bytes)."""
        self._is_blank[slot] = 0
        record = self._sealer.seal(identity, payload).ljust(self._layout.num_room_bytes, b"\0")
        offset = self._layout.offset(slot)
        done = os.pwritev(self.descriptor, [record, payload], offset)
        if done < len(record) + len(payload):  # after a signal, the next write goes on; on a full disk, it raises
            self._write_all(memoryview(record + bytes(payload))[done:], offset + done)

    def _write_all(self, data: memoryview, offset: int) -> None:
        while data:
            done = os.pwrite(self.descriptor, data, offset)
            data, offset = data[done:], offset + done

    def read(self, slot: int, identity: BlockIdentity, out: memoryview) -> bool:
        """Fill `out` with a block's payload. Returns False if the slot holds anything else. O(its bytes)."""
        record = bytearray(self._layout.num_room_bytes)
        offset, expected = self._layout.offset(slot), len(record) + len(out)
        done = os.preadv(self.descriptor, [record, out], offset)
        while 0 < done < expected:  # a read is short at the end of the file, and after signals on some systems
            more = os.pread(self.descriptor, expected - done, offset + done)
            if not more:
                break
            head = more[: max(0, len(record) - done)]
            record[done : done + len(head)] = head
            start = max(0, done - len(record))
            out[start : start + len(more) - len(head)] = more[len(head) :]
            done += len(more)
        return done == expected and self._sealer.opens(record, identity, out)

    def erase(self, slots: Iterable[int]) -> None:
        """Overwrite slots with zeros, each one's record last, and wait until that is on the disk. O(their bytes).

        A slot without a record may still hold a block's bytes, after a loss of power. So only slots that were erased
        before, and not written since, are skipped. A call after a failed one thus continues near where that one
        stopped. Erasing takes no space on the disk, since only bytes that were written are overwritten.
        """
        left = [slot for slot in slots if not self._is_blank[slot]]
        num_at_once = max(1, _MOST_UNFLUSHED // self._layout.stride)
        for begin in range(0, len(left), num_at_once):
            part = left[begin : begin + num_at_once]
            for slot in part:
                start = self._layout.offset(slot)
                bytes_at = start + self._layout.num_room_bytes
                overwrite(self.descriptor, bytes_at, start + self._layout.stride)
                overwrite(self.descriptor, start, bytes_at)
            self.flush()
            for slot in part:
                self._is_blank[slot] = 1

    @property
    def num_bytes(self) -> int:
        """The length of the file in bytes."""
        return os.fstat(self.descriptor).st_size

    @property
    def num_slots(self) -> int:
        """How many slots are completely in the file."""
        last_bytes = self._layout.num_room_bytes + self._layout.num_block_bytes
        return max(0, self.num_bytes + self._layout.stride - last_bytes) // self._layout.stride

    def cut(self, num_bytes: int) -> range:
        """Give back at least this many bytes at the file's end, or all. Returns the slots that hold nothing now.

        A read of such a slot finds nothing.
        """
        old = self.num_slots
        left = max(0, self.num_bytes - num_bytes) // self._layout.stride
        os.ftruncate(self.descriptor, self._layout.offset(left))
        return range(left, old)

    def flush(self) -> None:
        """Wait until everything that was written is on the disk."""
        flush(self.descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self.descriptor)


def overwrite(descriptor: int, start: int, end: int) -> None:
    """Write zeros over all data between two places of a file. Holes stay, since zeros there would take room."""
    zeros = memoryview(bytes(min(_MOST_ZEROS, end - start)))
    while True:
        try:
            start = os.lseek(descriptor, start, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:  # which means that there is no more
                raise
            return
        if start >= end:
            return
        stop = min(end, os.lseek(descriptor, start, os.SEEK_HOLE))
        while start < stop:
            start += os.pwrite(descriptor, zeros[: stop - start], start)
