#!/usr/bin/env python3
"""Writes what decoding and resizing of images must agree with: Pillow, torch and transformers.

tests/fuzz/corpus/fuzz_image: small files of every format and mode. tests/unit/image_golden.inc: the
digests of their pixels, and of images resized to the grids of processors.

usage: make_image_golden.py      (needs pillow, torchvision and requirements-dev.txt)
"""

import hashlib
import io
import pathlib
import random
import struct
import zlib

import numpy as np
import torch
from PIL import Image, ImageOps
from transformers.image_transforms import convert_to_rgb
from transformers.models.glm5_next.image_processing_glm5_next import Glm5NextImageProcessor
from transformers.models.glm4v.image_processing_glm4v import smart_resize as glm_resize
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize as qwen_resize

ROOT = pathlib.Path(__file__).resolve().parents[1]
CORPUS = ROOT / "tests/fuzz/corpus/fuzz_image"
SIZES = [(1, 1), (640, 480), (31, 900), (1, 180), (23, 17), (333, 77), (350, 294), (1111, 37), (64, 96)]
PROCESSORS = [(16, 65536, 16777216, "qwen"), (14, 3136, 100000, "qwen"), (14, 12544, 100000, "glm"), (14, 16, 100, "pad")]


def noise(width, height, channels):
    """The same bytes as noise() of tests/unit/test_image.c."""
    n = width * height * channels
    state = (np.arange(1, n + 1, dtype=np.uint64) * 2654435761) & 0xFFFFFFFF
    return ((state ^ (state >> 15)) >> 8 & 255).astype(np.uint8).reshape(height, width, channels)


def smooth(width, height, mode):
    bands = len(Image.new(mode, (1, 1)).getbands())
    small = [Image.fromarray(noise(5, 4, 1)[..., 0] + 40 * band) for band in range(bands)]
    return Image.merge(mode, [band.resize((width, height), Image.BICUBIC) for band in small])


def raw_png(width, height, bits, color, interlace=0):
    """A PNG of random samples, for what Pillow does not write."""
    draw = random.Random(bits * 8 + color)
    samples = {0: 1, 2: 3, 4: 2, 6: 4}[color]

    def rows(w, h):
        n = (w * samples * bits + 7) // 8
        return b"".join(b"\0" + draw.randbytes(n) for _ in range(h)) if w > 0 else b""

    passes = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2)]
    passes = passes + [(0, 1, 1, 2)] if interlace else [(0, 0, 1, 1)]
    data = b"".join(rows((width - x + i - 1) // i, (height - y + j - 1) // j) for x, y, i, j in passes)
    out = b"\x89PNG\r\n\x1a\n"
    head = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, interlace)
    for kind, body in ((b"IHDR", head), (b"IDAT", zlib.compress(data)), (b"IEND", b"")):
        out += struct.pack(">I", len(body)) + kind + body
        out += struct.pack(">I", zlib.crc32(kind + body))
    return out


def files():
    def save(image, kind, **options):
        out = io.BytesIO()
        image.save(out, kind, **options)
        return out.getvalue()

    palette = smooth(15, 9, "RGB").quantize(12)
    yield "png_rgb", save(smooth(19, 11, "RGB"), "PNG")
    yield "png_palette_alpha", save(palette, "PNG", transparency=bytes(range(0, 240, 20)))
    yield "png_transparent_color", save(palette.convert("RGB"), "PNG", transparency=palette.convert("RGB").getpixel((4, 4)))
    yield "png_1_bit", raw_png(13, 6, 1, 0)
    yield "png_grey_16", raw_png(5, 6, 16, 0)
    yield "png_grey_alpha", raw_png(7, 6, 8, 4)
    yield "png_rgba_interlaced", raw_png(9, 10, 8, 6, 1)
    yield "jpeg_grey", save(smooth(18, 9, "L"), "JPEG")
    yield "jpeg_420", save(smooth(35, 21, "RGB"), "JPEG")
    yield "jpeg_progressive", save(smooth(21, 17, "RGB"), "JPEG", progressive=True, subsampling=0)
    yield "jpeg_cmyk", save(smooth(17, 12, "CMYK"), "JPEG")
    exif = Image.Exif()
    for exif[0x112] in range(1, 9):
        yield f"jpeg_exif_{exif[0x112]}", save(smooth(9, 5, "RGB"), "JPEG", quality=40, exif=exif)
    exif[0x112] = 6
    yield "png_exif", save(smooth(6, 5, "RGB"), "PNG", exif=exif)
    yield "webp_exif", save(smooth(21, 9, "RGB"), "WEBP", exif=exif)
    yield "webp_lossless_alpha", save(smooth(13, 8, "RGBA"), "WEBP", lossless=True)
    yield "webp_alpha", save(smooth(20, 18, "RGBA"), "WEBP")
    yield "webp_animation", save(smooth(12, 10, "RGBA"), "WEBP", save_all=True, append_images=[smooth(12, 10, "RGBA").rotate(90)])


def digest(array):
    return hashlib.sha256(array.tobytes()).hexdigest()[:16]


def pixels_of(data):
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    if image.mode == "I;16":  # of 16 bits the upper 8
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return convert_to_rgb(image, return_numpy=True)


def resized(width, height, patch, least, most, rule):
    image = torch.from_numpy(noise(width, height, 3)).permute(2, 0, 1)[None]
    if rule == "pad":
        limits = {"min_image_tokens": least, "max_image_tokens": most}
        out = Glm5NextImageProcessor().resize(image, Image.BICUBIC, patch * 2, 2, **limits)
        h, w = out.shape[-2:]
        return h // patch, w // patch, digest(out[0].permute(1, 2, 0).contiguous().numpy())
    if rule == "glm":
        h, w = glm_resize(2, height, width, 2, patch * 2, least, most)
    else:
        h, w = qwen_resize(height, width, patch * 2, least, most)
    out = torch.nn.functional.interpolate(image, (h, w), mode="bicubic", antialias=True)
    return h // patch, w // patch, digest(out[0].permute(1, 2, 0).contiguous().numpy())


def main():
    CORPUS.mkdir(parents=True, exist_ok=True)
    lines = ["// Made by scripts/make_image_golden.py with Pillow and torch.\n"]
    for name, data in files():
        (CORPUS / name).write_bytes(data)
        pixels = pixels_of(data)
        height, width = pixels.shape[:2]
        lines.append(f'IMAGE_FILE("{name}", {width}, {height}, "{digest(pixels)}")\n')
    for width, height in SIZES:
        for i, processor in enumerate(PROCESSORS):
            grid_h, grid_w, what = resized(width, height, *processor)
            lines.append(f'IMAGE_RESIZED({width}, {height}, {i}, {grid_h}, {grid_w}, "{what}")\n')
    (ROOT / "tests/unit/image_golden.inc").write_text("".join(lines))


if __name__ == "__main__":
    main()
