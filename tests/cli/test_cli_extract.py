from __future__ import annotations

import io
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from toy import Run, Toy


def test_extract_writes_backbone_features(
    capvid: Run, toy: Toy, video_files: list[Path], tmp_path: Path
) -> None:
    from capvid.backbones.backbone import load_backbone
    from capvid.features.feature_file import load_features
    from capvid.video.frame_sampling import UniformSampling
    from capvid.video.readers import read_frames

    arguments = ["--backbone", "toy", "--frames", 4, "-o", tmp_path, "--batch-size", 3]
    assert capvid("extract", *video_files[:3], *arguments) == (0, "", "3 extracted\n")
    files = sorted(tmp_path.glob("*.safetensors"))
    backbone = load_backbone("toy", weights=toy.weights)
    assert len(files) == 3
    for file, video in zip(files, video_files, strict=False):
        sampled = read_frames(video, UniformSampling(4))
        features = load_features(file)
        assert features.header.streams == (backbone.header,)
        assert features.header.sampling == "uniform:4"
        np.testing.assert_allclose(features.streams[0], backbone(sampled.frames), rtol=2e-3, atol=1e-4)
        np.testing.assert_array_equal(features.times, sampled.times)


@pytest.mark.slow
def test_zip_of_images_is_a_batch_of_videos(capvid: Run, tmp_path: Path) -> None:
    """--clean drops the black and the repeated image."""
    from capvid.features.feature_file import load_features

    generator = np.random.default_rng(0)
    first, second = generator.integers(60, 255, (2, 6, 8, 3), np.uint8).repeat(8, 1).repeat(8, 2)
    images = {"a/0": first, "a/1": first, "a/2": 0 * first, "a/3": second, "b/0": second}
    with zipfile.ZipFile(tmp_path / "frames.zip", "w") as archive:
        for name, image in images.items():
            buffer = io.BytesIO()
            Image.fromarray(image).save(buffer, "PNG")
            archive.writestr(f"{name}.png", buffer.getvalue())
    arguments = ["extract", tmp_path / "frames.zip", "--backbone", "colour-grid", "--frames", 4]
    assert capvid(*arguments, "-o", tmp_path / "all") == (0, "", "2 extracted\n")
    assert capvid(*arguments, "--clean", "-o", tmp_path / "clean") == (0, "", "2 extracted\n")
    assert capvid(*arguments, "--clean", "-o", tmp_path / "clean") == (
        0,
        "",
        "0 extracted, 2 skipped (already done)\n",
    )
    unfiltered, clean = (load_features(tmp_path / name / "a.safetensors") for name in ("all", "clean"))
    assert (len(unfiltered), len(clean)) == (4, 2)
    assert clean.header.sampling == "uniform:4+clean"
    np.testing.assert_array_equal(clean.streams[0], unfiltered.streams[0][[0, 3]])
    assert len(load_features(tmp_path / "clean" / "b.safetensors")) == 1


def test_extract_two_layers_of_one_backbone(
    capvid: Run, toy: Toy, video_files: list[Path], tmp_path: Path
) -> None:
    from capvid.features.feature_file import load_features

    layers = ["--layer", "embedding", "--layer", "maps"]
    arguments = ["--backbone", "toy", "--backbone", "toy", *layers, "--frames", 2, "-o", tmp_path]
    assert capvid("extract", video_files[1], *arguments) == (0, "", "")
    (file,) = tmp_path.iterdir()
    assert [stream.shape for stream in load_features(file).streams] == [(2, 1280), (2, 4, 352)]


@pytest.mark.slow
def test_extract_skips_finished_videos(
    capvid: Run, toy: Toy, video_files: list[Path], tmp_path: Path, bad_files: dict[str, Path]
) -> None:
    arguments = ["extract", *video_files[:2], bad_files["text"], "--backbone", "toy", "-o", tmp_path / "out"]
    code, _, err = capvid(*arguments, "--frames", 2)
    assert (code, err.splitlines()[-1]) == (3, "2 extracted, 1 failed")
    assert err.startswith(f"error: {bad_files['text']}: ")
    mtimes = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert len(mtimes) == 2
    code, _, err = capvid(*arguments, "--frames", 2)
    assert (code, err.splitlines()[-1]) == (3, "0 extracted, 2 skipped (already done), 1 failed")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == mtimes
    truncated = min(mtimes)
    truncated.write_bytes(truncated.read_bytes()[:-100])
    assert capvid(*arguments, "--frames", 2)[2].splitlines()[-1].startswith("1 extracted, 1 skipped")
    assert capvid(*arguments, "--frames", 3)[2].splitlines()[-1] == "2 extracted, 1 failed"
    assert capvid(*arguments, "--frames", 3, "--overwrite")[2].splitlines()[-1] == "2 extracted, 1 failed"


def test_equal_names_give_separate_files(
    capvid: Run, toy: Toy, video_files: list[Path], tmp_path: Path
) -> None:
    for name in ("in/a/clip.mp4", "in/b/clip.mp4", "in/b/clip.mkv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(video_files[0], tmp_path / name)
    arguments = ["--backbone", "toy", "--frames", 1, "-o", tmp_path / "out"]
    assert capvid("extract", tmp_path / "in", *arguments) == (0, "", "3 extracted\n")
    assert len(list((tmp_path / "out").rglob("*.safetensors"))) == 3


@pytest.mark.slow
def test_views_are_written_beside_their_videos(
    capvid: Run, video_files: list[Path], tmp_path: Path, bad_files: dict[str, Path]
) -> None:
    from capvid.features.feature_file import load_features, load_header

    def mtimes() -> dict[str, int]:
        return {path.stem: path.stat().st_mtime_ns for path in out.iterdir()}

    out, separate_out = tmp_path / "out", tmp_path / "alone"
    inputs = ["extract", *video_files[:2], bad_files["text"], "--backbone", "colour-grid", "--frames", 3]
    arguments = [*inputs, "-o", out, "--workers", 1]
    assert capvid(*arguments)[2].endswith("2 extracted, 1 failed\n")
    before = mtimes()
    code, _, err = capvid(*arguments, "--views", 2)
    assert (code, err.count("error: "), err.splitlines()[-1]) == (3, 1, "2 extracted, 1 failed")
    with_views = mtimes()
    assert (
        sorted(with_views) == ["v0", "v0@1", "v0@2", "v1", "v1@1", "v1@2"]
        and before.items() <= with_views.items()
    )
    for name in before:
        views = [load_features(path) for path in sorted(out.glob(f"{name}*"), key=lambda path: path.stem)]
        assert [(features.video, features.view) for features in views] == [(name, n) for n in range(3)]
        assert len({features.streams[0].tobytes() for features in views}) == 3
        assert load_header(out / f"{name}@1.safetensors") == load_header(out / f"{name}.safetensors")
    single_video = ["extract", video_files[1], "--backbone", "colour-grid", "--frames", 3]
    assert capvid(*single_video, "--views", 3, "-o", separate_out, "--workers", 2, "--batch-size", 1) == (
        0,
        "",
        "",
    )
    for name in ("v1", "v1@1", "v1@2"):
        assert (separate_out / f"{name}.safetensors").read_bytes() == (
            out / f"{name}.safetensors"
        ).read_bytes()
    assert capvid(*arguments, "--views", 2)[2].endswith("0 extracted, 2 skipped (already done), 1 failed\n")
    assert mtimes() == with_views
    assert capvid(*arguments, "--views", 1, "--overwrite")[2].endswith("2 extracted, 1 failed\n")
    assert mtimes().items() & with_views.items() == {(name, with_views[name]) for name in ("v0@2", "v1@2")}


def test_views_conflicting_with_backbone_or_file_name(
    capvid: Run, video_files: list[Path], tmp_path: Path
) -> None:
    arguments = ["--backbone", "colour-grid", "--backbone", "x3d-xs", "--views", 1, "-o", tmp_path / "out"]
    code, _, err = capvid("extract", tmp_path / "nothing.mp4", *arguments)
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("error: x3d-xs sees clips of 4 frames, and --views are of single frames")
    for name in ("clip.mp4", "clip@2.mp4"):
        shutil.copy(video_files[0], tmp_path / name)
    arguments = ["extract", tmp_path, "--backbone", "colour-grid", "-o", tmp_path / "out"]
    code, _, err = capvid(*arguments, "--views", 2)
    assert (code, err.count("\n")) == (2, 1)
    assert (
        f"{tmp_path / 'clip@2.mp4'}: its features would have the name of a view of {tmp_path / 'clip.mp4'}"
        in err
    )
    assert not (tmp_path / "out").exists()
    assert capvid(*arguments, "--views", 1)[:2] == (0, "")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--backbone", "vgg99"], 2, "vgg99"),
        (["--backbone", "toy", "--layer", "fc9"], 2, "fc9"),
        (["--backbone", "toy", "--layer", "a", "--layer", "b"], 2, "2 layers for 1 backbones"),
        (["--backbone", "toy", "--backbone", "toy", "--weights", "x"], 2, "--weights"),
        (["--backbone", "toy", "--weights", "/none/x.safetensors"], 1, "/none/x.safetensors"),
    ],
)
def test_invalid_options_print_one_error_line(
    capvid: Run,
    toy: Toy,
    video_files: list[Path],
    tmp_path: Path,
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    exit_code, out, err = capvid("extract", video_files[0], *arguments, "-o", tmp_path)
    assert (exit_code, out) == (code, "")
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


def test_features_that_do_not_fit_are_one_line_with_the_command(
    capvid: Run, toy: Toy, video_files: list[Path], tmp_path: Path
) -> None:
    folder, fitting = tmp_path / "features", tmp_path / "fitting"
    capvid("extract", *video_files, "--backbone", "toy", "--sampling", "uniform:3", "-o", folder)
    for command in (["caption", folder], ["caption", *folder.iterdir()]):
        code, out, err = capvid(*command, "--model", toy.model)
        assert code == 1 and out.count("error: ") == out.count("\n")
        lines = err.splitlines()
        assert len(lines) == 3 and lines[1] == "error: 4 more feature files do not fit for the same reason"
        shown = lines[0].partition("sampling: capvid ")[2].split()
        assert lines[0].startswith(f"error: {folder}") and lines[2].startswith("0 captioned, 5 failed")
    shown[shown.index("VIDEOS")] = str(video_files[0].parent)
    shown[shown.index("FEATURES")] = str(fitting)
    assert capvid(*shown)[0] == 0
    assert capvid("caption", fitting, "--model", toy.model)[0] == 0


def test_a_folder_of_features_is_captioned(
    capvid: Run, toy: Toy, video_files: list[Path], tmp_path: Path
) -> None:
    folder = tmp_path / "features"
    capvid("extract", video_files[0].parent, "--backbone", "toy", "--frames", 4, "--views", 1, "-o", folder)
    shutil.copy(toy.weights, folder / "a.safetensors")  # no features
    shutil.copy(toy.weights, folder / "v0@x.safetensors")
    code, out, _ = capvid("caption", folder, "--model", toy.model)
    names = [Path(line.partition("\t")[0]).name for line in out.splitlines()]
    assert code == 0 and names == [f"v{number}.safetensors" for number in range(5)]
    code, _, err = capvid("extract", folder, "--backbone", "toy", "-o", tmp_path / "again")
    assert code == 1 and "no videos in this folder, but feature files; " in err
    shutil.copy(video_files[0], folder / "v.mp4")
    assert "v.mp4" not in capvid("caption", folder, "--model", toy.model)[2]
