from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_training import SMALL_M3, SilentReporter, make_trainer

from capvid.captioners.checkpoint import load_checkpoint
from capvid.errors import CheckpointError, TrainingError, UsageError
from capvid.text.vocabulary import BOS, EOS
from capvid.training.objectives import SOFT_TARGETS, TeacherForcedLoss
from capvid.training.recipe import load_recipe
from capvid.training.trainer import Trainer

K = 5


def run_teacher(folder: Path, seed: int) -> Trainer:
    folder.mkdir()
    teacher = make_trainer(
        folder, "m3", "training.epochs=2", f"training.seed={seed}", f"training.soft_targets={K}"
    )
    teacher.run()
    return teacher


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> list[Trainer]:
    folder = tmp_path_factory.mktemp("teachers")
    return [run_teacher(folder / str(seed), seed) for seed in (1, 2)]


def build_student(folder: Path, teachers: list[Trainer], *settings: str, resume: bool = False) -> Trainer:
    return Trainer(
        load_recipe("m3-small", [*SMALL_M3, "training.epochs=2", *settings]),
        videos=teachers[0].videos,
        store=teachers[0].store,
        folder=folder,
        device=torch.device("cpu"),
        reporter=SilentReporter(),
        teachers=[teacher.folder for teacher in teachers],
        resume=resume,
    )


def stepwise_probabilities(folder: Path, frames: torch.Tensor, caption: list[int]) -> torch.Tensor:
    """Decode a caption word by word: probabilities (L + 1, V)."""
    captioner = load_checkpoint(folder).captioner
    with torch.no_grad():
        state = captioner.encode(frames.float().unsqueeze(0), torch.ones(1, len(frames), dtype=torch.bool))
        rows = []
        for word in [BOS, *caption]:
            logits, state, _ = captioner.step(torch.tensor([word]), state)
            rows.append(logits[0].softmax(-1))
    return torch.stack(rows)


def test_soft_targets_are_the_most_probable_words(teachers: list[Trainer]) -> None:
    teacher = teachers[0]
    stored = load_file(teacher.folder / SOFT_TARGETS)
    start = 0
    for example in teacher.batches.examples:
        for caption in example.captions:
            expected = stepwise_probabilities(teacher.folder, example.frames, caption)
            for position, row in enumerate(expected, start):
                best = sorted(range(len(row)), key=lambda word, row=row: -row[word])[:K]
                assert stored["words"][position].tolist() == best
                normalised = row[best] / row[best].sum()
                torch.testing.assert_close(
                    stored["probabilities"][position].float(), normalised, rtol=0, atol=1e-3
                )
            start += len(expected)
    assert start == len(stored["words"])


def test_loss_mixes_references_and_the_mean_of_the_teachers(tmp_path: Path, teachers: list[Trainer]) -> None:
    student = build_student(tmp_path / "run", teachers, "training.distillation=0.3")
    plan = next(iter(student.batches.epoch(1)))
    batch = plan.part(0, 1)()
    loss = TeacherForcedLoss(student.captioner.eval(), 0.0, distillation=0.3)
    with torch.no_grad():
        actual = float(loss(batch.to(torch.device("cpu"))))
        z = student.captioner.teacher_forced(batch.features.float(), batch.mask, batch.inputs)
        logprobs = student.captioner.logits(z).log_softmax(-1)  # (B, L, V)
    expected = 0.0
    for row, item in enumerate(plan.rows):
        caption = item.example.captions[item.choice]
        means = [stepwise_probabilities(teacher.folder, item.example.frames, caption) for teacher in teachers]
        for position, word in enumerate([*caption, EOS]):
            soft = 0.0
            for probabilities in means:
                top = probabilities[position].topk(K)
                weights = top.values / top.values.sum()
                soft -= float((weights * logprobs[row, position, top.indices]).sum()) / len(means)
            expected += 0.7 * -float(logprobs[row, position, word]) + 0.3 * soft
    assert actual == pytest.approx(expected, rel=1e-3)


def test_student_follows_its_teacher(tmp_path: Path, teachers: list[Trainer]) -> None:
    """With all the weight on the teacher, the student's distribution moves towards it."""
    teacher = teachers[:1]

    def distance(student: Trainer) -> float:
        loss = TeacherForcedLoss(student.captioner.eval(), 0.0, distillation=1.0)
        with torch.no_grad():
            plans = student.batches.epoch(1)
            return sum(float(loss(plan.part(0, 1)().to(torch.device("cpu")))) for plan in plans)

    student = build_student(tmp_path / "run", teacher, "training.distillation=1.0", "training.epochs=8")
    initial = distance(student)
    student.run()
    assert distance(student) < 0.7 * initial


def test_validation_loss_is_the_mean_over_all_words(teachers: list[Trainer]) -> None:
    teacher = teachers[0]
    rows = [json.loads(line) for line in (teacher.folder / "metrics.jsonl").read_text().splitlines()]
    best = max(rows, key=lambda row: row["val_cider"])
    total = words = 0
    for video in teacher.val:
        caption = teacher.vocabulary.encode(video.captions[0].split())
        probabilities = stepwise_probabilities(teacher.folder, teacher.reader(video.id), caption)
        for position, word in enumerate([*caption, EOS]):
            total -= float(probabilities[position, word].log())
            words += 1
    assert best["val_loss"] == pytest.approx(total / words, rel=1e-4)


def test_finished_run_adds_soft_targets_on_resume(tmp_path: Path) -> None:
    first = make_trainer(tmp_path, "m3", "training.epochs=1")
    first.run()
    assert not (first.folder / SOFT_TARGETS).exists()
    recipe = load_recipe("m3-small", [*SMALL_M3, "training.epochs=1", "training.soft_targets=3"])
    inputs = {"videos": first.videos, "store": first.store, "folder": first.folder, "device": first.device}
    Trainer(recipe, reporter=SilentReporter(), resume=True, **inputs).run()
    assert load_file(first.folder / SOFT_TARGETS)["words"].shape[1] == 3


def test_resumed_student_needs_the_same_teachers(tmp_path: Path, teachers: list[Trainer]) -> None:
    build_student(tmp_path / "run", teachers[:1]).run()
    build_student(tmp_path / "run", teachers[:1], resume=True).run()
    with pytest.raises(CheckpointError, match="with another teachers"):
        build_student(tmp_path / "run", teachers[1:], resume=True)


def test_unusable_teachers_are_reported(tmp_path: Path, teachers: list[Trainer]) -> None:
    plain = make_trainer(tmp_path, "m3", "training.epochs=1")
    plain.run()
    with pytest.raises(UsageError, match=r"no soft targets.*training\.soft_targets"):
        build_student(tmp_path / "student", [plain])
    with pytest.raises(UsageError, match="other captions or of another vocabulary"):
        build_student(tmp_path / "student", teachers, "data.min_count=5")
    (plain.folder / SOFT_TARGETS).write_bytes(b"\xff" * 100)
    with pytest.raises(TrainingError, match="damaged"):
        build_student(tmp_path / "student", [plain])


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda words, probabilities: (words[1:], probabilities[1:]), "of the shape"),
        (lambda words, probabilities: (words, probabilities[:, 1:]), "of the shape"),
        (lambda words, probabilities: (words[:, 0], probabilities[:, 0]), "of the shape"),
        (lambda words, probabilities: (words.repeat(1, 50), probabilities.repeat(1, 50)), "1 to"),
        (lambda words, probabilities: (words.long(), probabilities), "as I32"),
        (lambda words, probabilities: (words - 10, probabilities), "words must be from 0 to"),
        (lambda words, probabilities: (words + 1000, probabilities), "words must be from 0 to"),
        (
            lambda words, probabilities: (words, probabilities * torch.nan),
            "probabilities must be from 0 to 1",
        ),
        (lambda words, probabilities: (words, -probabilities), "probabilities must be from 0 to 1"),
    ],
)
def test_damaged_soft_targets_are_refused(
    tmp_path: Path, teachers: list[Trainer], damage: Callable[..., tuple[torch.Tensor, ...]], reason: str
) -> None:
    path = teachers[0].folder / SOFT_TARGETS
    content = path.read_bytes()
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    stored = load_file(path)
    words, probabilities = damage(stored["words"], stored["probabilities"])
    tensors = {"words": words.contiguous(), "probabilities": probabilities.contiguous()}
    try:
        save_file(tensors, path, metadata=metadata)
        with pytest.raises(TrainingError, match=f"damaged.*{reason}"):
            build_student(tmp_path / "student", teachers[:1])
    finally:
        path.write_bytes(content)


def test_validation_batches_are_no_larger_than_in_training(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "m3", "training.batch_size=8", "training.accumulate=3")
    assert sorted(map(len, trainer.validation_plans)) == [2, 3, 3, 3, 3, 3, 3]


def test_paragraph_captioners_have_no_soft_targets() -> None:
    with pytest.raises(UsageError, match="paragraphs"):
        load_recipe("mart-small", ["training.soft_targets=4"])
