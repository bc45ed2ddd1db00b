"""Which records a checkpoint's files hold: a fingerprint of each, in a file beside them.

Every record (what one ``torch.save`` wrote) carries checksums of its own bytes, so that it tells
whether it is damaged, but not whether it is the one that was saved there: a file of another step
or another rank is just as whole. This file tells them apart. DCP neither needs nor reads it.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FILE = ".checksums"
FORMAT = 1
_TAIL_BYTES = 1024


def fingerprint(record: bytes) -> int:
    """The checksum of a record's end, where a zip file lists the checksums of all its parts."""
    return zlib.crc32(record[-_TAIL_BYTES:])


def fingerprint_at(file: int, offset: int, length: int) -> int:
    """The fingerprint of the record of that many bytes at an offset of an open file."""
    tail = min(length, _TAIL_BYTES)
    return zlib.crc32(os.pread(file, tail, offset + length - tail))


@dataclass(frozen=True)
class Checksums:
    """What was saved.

    Args:
        metadata: CRC-32 of DCP's metadata file.
        records: Fingerprints by file and offset in bytes.
    """

    metadata: int
    records: Mapping[str, Mapping[int, int]]

    def write(self, folder: Path) -> None:
        """Write the file and bring it to the disk."""
        value = {"format": FORMAT, "metadata": self.metadata, "records": self.records}
        with (folder / FILE).open("w", encoding="utf-8") as file:
            json.dump(value, file)
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, folder: Path) -> Checksums | None:
        """Read the file; None where there is none, as in what plain ``dcp.save`` wrote.

        Raises:
            ValueError: It is damaged, or of a newer format.
            OSError: It cannot be read.
        """
        try:
            text = (folder / FILE).read_bytes()
        except FileNotFoundError:
            return None
        try:
            value = json.loads(text)
            form = value["format"]
            records = {
                name: {int(offset): int(crc) for offset, crc in found.items()}
                for name, found in value["records"].items()
            }
            checksums = cls(int(value["metadata"]), records)
        except (ValueError, TypeError, KeyError, AttributeError) as fault:
            raise ValueError(f"is damaged ({type(fault).__name__})") from None
        if form != FORMAT:
            raise ValueError(f"is of format {form}, and this version reads format {FORMAT}")
        return checksums
