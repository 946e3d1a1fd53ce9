"""Sheets of images: where every pixel goes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedeas_flwr.common.image_sheet import classes_to_show, image_sheet, save_sheet
from fedeas_flwr.report.samples import draw_rows


def test_images_stand_in_rows_with_white_lines_between_them() -> None:
    first = np.array([[[[1], [2]], [[3], [4]]], [[[5], [6]], [[7], [8]]]], np.uint8)
    second = np.array([[[[9], [10]], [[11], [12]]]], np.uint8)  # one image fewer
    sheet = image_sheet([first, second], columns=2)
    wanted = [
        [1, 2, 255, 5, 6],
        [3, 4, 255, 7, 8],
        [255, 255, 255, 255, 255],
        [9, 10, 255, 255, 255],
        [11, 12, 255, 255, 255],
    ]
    assert sheet.shape == (5, 5, 3)
    assert all(sheet[..., channel].tolist() == wanted for channel in range(3))


def test_colours_keep_their_channels_and_the_line_grows_with_the_images() -> None:
    images = np.zeros((3, 32, 32, 3), np.uint8) + np.array([10, 20, 30], np.uint8)
    sheet = image_sheet([images], columns=4)
    assert sheet.shape == (32, 4 * 32 + 3 * 2, 3)
    assert (sheet[:, 34:66] == [10, 20, 30]).all() and (sheet[:, 32:34] == 255).all() and (sheet[:, 100:] == 255).all()


@pytest.mark.parametrize(("side", "times"), [(8, 8), (24, 2), (64, 1), (100, 1)])
def test_a_file_shows_small_images_enlarged(tmp_path: Path, side: int, times: int) -> None:
    rows = [np.random.default_rng(0).integers(0, 256, (2, side, side, 1), np.uint8)]
    save_sheet(rows, 2, tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as picture:
        found = np.asarray(picture)
    sheet = image_sheet(rows, 2)
    assert found.shape == (times * side, times * sheet.shape[1], 3)
    assert (found[::times, ::times] == sheet).all() and (found[times - 1 :: times, times - 1 :: times] == sheet).all()


def test_a_drawn_sheet_names_every_row_at_its_middle() -> None:
    rows = [("cat", np.zeros((2, 8, 8, 1), np.uint8)), ("dog", np.zeros((1, 8, 8, 1), np.uint8))]
    (axes,) = draw_rows(rows, columns=3).axes
    assert axes.images[0].get_array().shape == (17, 26, 3)
    assert [text.get_text() for text in axes.get_yticklabels()] == ["cat", "dog"]
    assert axes.get_yticks().tolist() == [4, 13]


def test_classes_are_spread_from_the_first_to_the_last() -> None:
    assert classes_to_show(10, 10) == list(range(10))
    assert classes_to_show(3, 10) == [0, 1, 2]
    assert classes_to_show(100, 10) == [0, 11, 22, 33, 44, 55, 66, 77, 88, 99]
