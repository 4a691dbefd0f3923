"""Image files of all kinds: decoded as people see them, the size known beforehand, and everything broken refused."""

import io
import random
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from async_grpo.errors import ConfigurationError
from async_grpo.processes.image_files import decoded_image, image_size

ORIENTATION = 0x0112


def file_of(image: Image.Image, file_format: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def noise(width: int = 40, height: int = 20, seed: int = 0) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3))
    return Image.fromarray(values.astype(np.uint8))


def corners() -> Image.Image:
    """A picture of 40 x 20 pixels with four corners of different colors, which JPEG keeps."""
    values = np.zeros((20, 40, 3), np.uint8)
    values[:10, :20] = (250, 20, 20)
    values[:10, 20:] = (20, 250, 20)
    values[10:, :20] = (20, 20, 250)
    values[10:, 20:] = (240, 240, 240)
    return Image.fromarray(values)


def pixels(content: bytes) -> np.ndarray:
    image = decoded_image(content)
    assert image.mode == "RGB" and image.size == image_size(content)
    return np.asarray(image)


# What people see of a photo whose camera was held in one of 8 ways, by the definition of the tag in EXIF
UPRIGHT = {
    1: lambda values: values,
    2: lambda values: values[:, ::-1],
    3: lambda values: values[::-1, ::-1],
    4: lambda values: values[::-1],
    5: lambda values: values.transpose(1, 0, 2),
    6: lambda values: np.rot90(values, -1),
    7: lambda values: values[::-1, ::-1].transpose(1, 0, 2),
    8: lambda values: np.rot90(values, 1),
}


@pytest.mark.parametrize("orientation", UPRIGHT)
@pytest.mark.parametrize(
    ("file_format", "options"),
    [
        ("JPEG", {"quality": 95, "subsampling": 0}),
        ("WEBP", {"lossless": True}),
        # What phones write: a JPEG with a second picture, which Pillow calls MPO
        ("MPO", {"save_all": True, "quality": 95, "subsampling": 0, "append_images": [noise()]}),
    ],
)
def test_a_photo_is_turned_upright_in_all_eight_ways(orientation, file_format, options):
    photo = corners()
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    seen = pixels(file_of(photo, file_format, exif=exif, **options)).astype(int)
    expected = UPRIGHT[orientation](np.asarray(photo)).astype(int)
    assert seen.shape == expected.shape
    assert np.abs(seen - expected).mean() < 10  # a wrong turn differs by 60 and more


def exif_of(kind: int, count: int, value: bytes) -> bytes:
    """EXIF with the tag of the orientation alone, of any type."""
    entry = struct.pack(">HHHI", 1, ORIENTATION, kind, count) + value.ljust(4, b"\0")
    return b"Exif\0\0MM\0*" + struct.pack(">I", 8) + entry + b"\0\0\0\0"


@pytest.mark.parametrize(
    "exif",
    [
        exif_of(3, 1, b"\0\0"),
        exif_of(3, 1, b"\0\x09"),
        exif_of(2, 2, b"6\0"),
        exif_of(7, 4, b"\xff\xfe\xff\xfe"),
        exif_of(11, 1, struct.pack(">f", 6.5)),
        exif_of(5, 1, struct.pack(">I", 9999)),
        exif_of(99, 1, b"\0\x06"),
        b"Exif\0\0MM\0*",
        b"Exif\0\0garbage",
    ],
)
def test_an_orientation_that_is_none_is_ignored(exif):
    assert pixels(file_of(corners(), "JPEG", exif=exif)).shape == (20, 40, 3)


def test_grays_of_16_bits_keep_their_shades():
    """Pillow alone makes every value above 255 white."""
    grays = np.linspace(0, 65535, 400).astype(np.uint16).reshape(20, 20)
    seen = pixels(file_of(Image.fromarray(grays), "PNG"))
    expected = np.round(grays.astype(float) / 257)
    np.testing.assert_array_equal(seen, np.repeat(expected[..., None], 3, axis=2))


@pytest.mark.parametrize("hidden", [(0, 0, 0), (255, 0, 0)])
@pytest.mark.parametrize("file_format", ["PNG", "WEBP"])
def test_transparent_pixels_are_white_whatever_color_is_behind_them(hidden, file_format):
    """A drawing of black lines on a transparent ground would be all black without its transparency."""
    values = np.zeros((8, 8, 4), np.uint8)
    values[..., :3] = hidden
    values[2, :, :] = (0, 0, 0, 255)
    values[5, :, :] = (0, 0, 0, 127)
    options = {"lossless": True, "exact": True} if file_format == "WEBP" else {}
    seen = pixels(file_of(Image.fromarray(values), file_format, **options))
    assert (seen[2] == 0).all()
    np.testing.assert_allclose(seen[5], 128, atol=1)
    assert (np.delete(seen, [2, 5], axis=0) == 255).all()


def test_gray_and_palette_images_may_be_transparent_too():
    gray = Image.fromarray(np.array([[0, 100], [200, 0]], np.uint8))
    seen = pixels(file_of(gray, "PNG", transparency=0))
    assert seen[..., 0].tolist() == [[255, 100], [200, 255]]
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 0, 0, 0])
    palette.putpixel((1, 0), 1)
    for file_format in ("PNG", "GIF"):
        seen = pixels(file_of(palette, file_format, transparency=1))
        assert seen[0].tolist() == [[10, 20, 30], [255, 255, 255]]


@pytest.mark.parametrize(
    ("mode", "file_format", "expected"),
    [("1", "PNG", 255), ("L", "PNG", 77), ("P", "GIF", 77), ("CMYK", "JPEG", 178), ("L", "BMP", 77)],
)
def test_other_modes_become_rgb(mode, file_format, expected):
    value = {"1": 1, "L": 77, "P": 77, "CMYK": (77, 77, 77, 0)}[mode]
    image = Image.new(mode, (5, 4), value)
    if mode == "P":
        image.putpalette(list(np.repeat(np.arange(256), 3)))
    np.testing.assert_allclose(pixels(file_of(image, file_format)), expected, atol=2)


@pytest.mark.parametrize("file_format", ["GIF", "WEBP", "PNG"])
def test_an_animation_shows_its_first_picture(file_format):
    first = Image.new("RGB", (10, 6), (200, 0, 0))
    second = Image.new("RGB", (10, 6), (0, 0, 200))
    options = {"lossless": True} if file_format == "WEBP" else {}
    content = file_of(first, file_format, save_all=True, append_images=[second], **options)
    np.testing.assert_allclose(pixels(content)[0, 0], [200, 0, 0], atol=2)


@pytest.mark.parametrize("size", [(1, 1), (1, 500), (3, 3), (500, 1)])
def test_small_and_thin_images_are_decoded(size):
    assert pixels(file_of(noise(*size), "PNG")).shape == (size[1], size[0], 3)


def png_of_size(width: int, height: int) -> bytes:
    """The header of a PNG file of this size, without pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(20_000, 20_000), (2**31 - 1, 1), (2**31 - 1, 2**31 - 1), (8193, 8192)])
def test_an_image_of_too_many_pixels_is_refused_by_its_header(size):
    for reads in (image_size, decoded_image):
        with pytest.raises(ConfigurationError, match="pixels"):
            reads(png_of_size(*size))


def test_a_truncated_file_is_refused_wherever_it_is_cut():
    for content in (file_of(noise(), "PNG"), file_of(noise(), "JPEG"), file_of(noise(), "BMP")):
        for end in range(0, len(content) - 20, 37):
            with pytest.raises(ConfigurationError):
                decoded_image(content[:end])


@pytest.mark.parametrize(
    "content", [b"", b"\0", b"GIF89a", b"\x89PNG\r\n\x1a\n", b"RIFF\0\0\0\0WEBP", b"BM" + b"\xff" * 60]
)
def test_garbage_is_refused(content):
    for reads in (image_size, decoded_image):
        with pytest.raises(ConfigurationError, match="cannot be decoded|pixels"):
            reads(content)


@pytest.mark.parametrize("file_format", ["TIFF", "PPM", "ICO", "TGA"])
def test_other_formats_are_refused_by_name(file_format):
    with pytest.raises(ConfigurationError, match="give one of the formats PNG, JPEG, WEBP, GIF, BMP"):
        decoded_image(file_of(noise(), file_format))


def test_a_file_with_changed_bytes_is_decoded_with_the_size_of_its_header_or_refused():
    """The number of placeholders follows from the header, so a decoded image of another size would end a run."""
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    exif[0x010F] = "a camera"
    contents = [
        file_of(noise(), "PNG"),
        file_of(noise().convert("P"), "PNG", transparency=3),
        file_of(noise(), "JPEG", exif=exif),
        file_of(noise(), "WEBP", exif=exif),
        file_of(noise(), "GIF", save_all=True, append_images=[noise(seed=1)]),
        file_of(noise(), "BMP"),
        file_of(noise(), "MPO", save_all=True, append_images=[noise(seed=1)], exif=exif),
    ]
    dice = random.Random(0)
    num_decoded = 0
    for content in contents:
        for _ in range(150):
            changed = bytearray(content)
            # Most bytes that mean something stand at the beginning
            longest = len(changed) if dice.random() < 0.3 else 200
            for _ in range(dice.randint(1, 4)):
                changed[dice.randrange(min(longest, len(changed)))] = dice.randrange(256)
            try:
                image = decoded_image(bytes(changed))
            except ConfigurationError:
                continue
            num_decoded += 1
            assert image.mode == "RGB" and image.size == image_size(bytes(changed))
    assert num_decoded > 100
