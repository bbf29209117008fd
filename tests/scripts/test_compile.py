"""torch.compile changes neither the losses nor what a checkpoint holds.

The first test captures with a backend that compiles no kernels; the second compiles those of the script's small model.
"""

from pathlib import Path

import pytest
from launching import ROOT, checkpoint_tensors, training_rows

DETR = Path(__file__).parent / "configs" / "detr_published.yaml"


@pytest.mark.slow
def test_compiled_losses_and_checkpoints_are_those_of_the_eager_model(server, data, tmp_path):
    annotations = data / "annotations"
    args = ["--config", DETR, "--data.train", annotations / "train.json", "--data.val", annotations / "val.json",
            "--data.image_size", 64, "--data.workers", 0, "--data.batch_size_per_device", 4, "--run.log_every", 1,
            "--run.output_dir", tmp_path, "--run.max_steps", 3, "--run.eval_every", 0, "--eval.pictures", 0,
            "--run.precision", "bf16", "--optim.ema_decay", 0.9]  # fmt: skip
    path = ROOT / "scripts" / "train_detr.py"
    eager = server.run(path, [*args, "--run.name", "eager"]).ok()
    compiled = server.run(path, [*args, "--run.name", "compiled", "--optim.compile", "aot_eager"]).ok()
    assert "torch.compile: " in compiled.text and "torch.compile: " not in eager.text
    same_losses(compiled, eager, rel=2e-2)  # in bfloat16
    ours, theirs = (checkpoint_tensors(run.folder / "checkpoints" / "latest") for run in (compiled, eager))
    assert ours.keys() == theirs.keys()


@pytest.mark.slow
@pytest.mark.every_script("slow")
def test_compiled_kernels_give_the_same_losses(server, script, settings, tmp_path):
    args = settings("--run.output_dir", tmp_path, "--run.max_steps", 3, "--run.eval_every", 0, *script.one_size)
    eager = server.run(script, [*args, "--run.name", "eager"]).ok()
    compiled = server.run(script, [*args, "--run.name", "compiled", "--optim.compile", "true"], within_s=1200).ok()
    assert "graph breaks" in compiled.text
    same_losses(compiled, eager, rel=1e-3)


def same_losses(run, other, rel: float) -> None:
    for mine, plain in zip(training_rows(run.folder), training_rows(other.folder), strict=True):
        losses = [name for name in plain if name.startswith("train/loss")]
        assert {n: mine[n] for n in losses} == pytest.approx({n: plain[n] for n in losses}, rel=rel)
