"""The state of a training run: everything that its next step depends on, in one file that is no pickle.

A run that is killed at any moment goes on from it and ends with the weights of one that was never broken off.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from capvid.errors import CheckpointError
from capvid.files import atomic_path, open_regular
from capvid.parsing import parse_json
from capvid.training.optimise import AveragedWeights
from capvid.training.recipe import Recipe

STATE = "state.safetensors"
_FORMAT = 2
_DAMAGES = (OSError, SafetensorError, LookupError, ValueError, RuntimeError, TypeError, AttributeError)
_FREE = ("accumulate", "save_every")  # options that a run may be resumed with others of


@dataclass(frozen=True, kw_only=True)
class Learner:
    """What changes from step to step.

    Attributes:
        module: the captioner.
        optimizer: of its weights.
        schedule: of the learning rate.
        average: the running average of the weights, if there is one.
        device: where it is trained; of its generator, the numbers of dropout are drawn.
        accelerator: the processes that train; their generators differ, all the rest is the same in each.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LambdaLR
    average: AveragedWeights | None
    device: torch.device
    accelerator: Accelerator

    def tensors(self) -> dict[str, Tensor]:
        """All of it that are tensors, by name; all processes must ask at once."""
        found = {f"module.{name}": tensor for name, tensor in self.module.state_dict().items()}
        for index, kept in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{index}.{key}": torch.as_tensor(value) for key, value in kept.items()}
        weights = self.average.weights if self.average else ()
        found |= {f"average.{number}": weight for number, weight in enumerate(weights)}
        found["generators.cpu"] = self._of_all(torch.get_rng_state())
        if self.device.type == "cuda":
            found["generators.cuda"] = self._of_all(torch.cuda.get_rng_state(self.device))
        return {name: tensor.detach().cpu().contiguous() for name, tensor in found.items()}

    @property
    def optimizer_weights(self) -> list[Tensor]:
        """The weights in the order in which the optimizer numbers them."""
        return [weight for group in self.optimizer.param_groups for weight in group["params"]]

    def _of_all(self, state: Tensor) -> Tensor:
        """The generators' states of all processes, (processes, bytes)."""
        gathered: Tensor = self.accelerator.gather(state.unsqueeze(0).to(self.device))
        return gathered

    def numbers(self) -> dict[str, Any]:
        """The rest of it, fit for JSON."""
        return {
            "rates": [group["lr"] for group in self.optimizer.param_groups],
            "steps": self.schedule.last_epoch,
            "averaged": self.average.steps if self.average else 0,
        }

    def restore(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Take over a state.

        Raises:
            KeyError, RuntimeError, ValueError: it is that of something else.
        """
        self.module.load_state_dict(_below("module.", tensors))
        state = self.optimizer.state_dict()
        state["state"] = {}
        for name, tensor in _below("optimizer.", tensors).items():
            number, _, key = name.partition(".")
            weight = self.optimizer_weights[int(number)]
            if tensor.shape not in (weight.shape, ()):
                raise ValueError(f"optimizer.{name} is of another shape than its weight")
            state["state"].setdefault(int(number), {})[key] = tensor
        for group, rate in zip(state["param_groups"], numbers["rates"], strict=True):
            group["lr"] = rate
        self.optimizer.load_state_dict(state)
        self.schedule.last_epoch = numbers["steps"]
        self.schedule._last_lr = list(numbers["rates"])
        if self.average:
            for index, weight in enumerate(self.average.weights):
                weight.copy_(tensors[f"average.{index}"])
            self.average.steps = numbers["averaged"]
        rank = self.accelerator.process_index
        if rank < len(tensors["generators.cpu"]):  # else it was saved by fewer processes
            torch.set_rng_state(tensors["generators.cpu"][rank].clone())
            if self.device.type == "cuda" and "generators.cuda" in tensors:
                torch.cuda.set_rng_state(tensors["generators.cuda"][rank].clone(), self.device)


def identity(recipe: Recipe, data: Sequence[str]) -> dict[str, Any]:
    """What the state of a run must agree with: how is learned, and from which ``data``."""
    options = recipe.to_dict()
    options["training"] = {k: v for k, v in options["training"].items() if k not in _FREE}
    return {"recipe": options, "data": hashlib.sha256("\n".join(data).encode()).hexdigest()}


def save_state(path: Path, learner: Learner, run: Mapping[str, Any], progress: Mapping[str, Any]) -> None:
    """Write the state, whole or not at all; the first process does, and all must ask at once.

    Args:
        path: the file.
        learner: what is learned.
        run: what tells this run from others; a state is only taken over by one of the same.
        progress: where the run stands.
    """
    note = {"format": _FORMAT, "run": dict(run), "progress": dict(progress), **learner.numbers()}
    tensors = learner.tensors()
    if learner.accelerator.is_main_process:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as temporary:
            save_file(tensors, temporary, metadata={"capvid": json.dumps(note)})


def load_state(
    path: Path, learner: Learner, run: Mapping[str, Any], check: Callable[[dict[str, Any]], object]
) -> dict[str, Any]:
    """Restore the state in the file and return the progress; ``check`` raises an error where it is none.

    Raises:
        CheckpointError: the file is damaged, or of a run with another recipe or other data.
    """
    try:
        open_regular(path).close()
        with safe_open(path, "pt") as file:
            note = parse_json((file.metadata() or {})["capvid"])
        if note["format"] != _FORMAT:
            raise ValueError(f"format {note['format']}")
        for name, value in run.items():
            if note["run"].get(name) != json.loads(json.dumps(value)):
                raise CheckpointError(
                    f"{path}: the state of a run with another {name}",
                    remedy=f"give the {name} that it was begun with, or begin anew with --overwrite",
                )
        learner.restore(load_file(path), note)
        progress: dict[str, Any] = note["progress"]
        check(progress)
    except (
        OSError,
        SafetensorError,
        LookupError,
        ValueError,
        RuntimeError,
        TypeError,
        AttributeError,
    ) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{path}: damaged, no state to resume from ({reason})", remedy="begin anew with --overwrite"
        ) from error
    return progress


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
