"""Images for the tests, and conversations with them."""

import base64
import struct
import zlib

import numpy as np

SIDE = 224
N_TOKENS = 49  # of the shape tiny-qwen3-vl


def png(seed, side=SIDE):
    """An image of random blocks."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (8, 8, 3), np.uint8).repeat(side // 8, 0).repeat(side // 8, 1)
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def encoded(seed):
    return base64.b64encode(png(seed)).decode()


def part(seed):
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + encoded(seed)}}


def user(*parts):
    return {"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}
