"""torch.compile changes neither the losses nor what a checkpoint holds."""

import pytest
from launching import SCRIPTS, checkpoint_tensors, training_rows


@pytest.mark.slow
@pytest.mark.every_script
def test_compiled_losses_and_checkpoints_are_those_of_the_eager_model(server, script, settings, tmp_path):
    """Kernels are compiled for one script; the graphs of all are captured."""
    args = settings("--run.output_dir", tmp_path, "--run.max_steps", 3, "--run.eval_every", 0,
                    "--eval.batch_size_per_device", 10, *script.one_size)  # fmt: skip
    backend = "true" if script == SCRIPTS[0] else "aot_eager"
    eager = server.run(script, [*args, "--run.name", "eager"]).ok()
    compiled = server.run(script, [*args, "--run.name", "compiled", "--optim.compile", backend], within_s=1200).ok()
    assert "torch.compile: " not in eager.text
    assert "torch.compile: " in compiled.text and (backend != "true" or "graph breaks" in compiled.text)
    for mine, plain in zip(training_rows(compiled.folder), training_rows(eager.folder), strict=True):
        losses = [name for name in plain if name.startswith("train/loss")]
        assert {n: mine[n] for n in losses} == pytest.approx({n: plain[n] for n in losses}, rel=1e-3)
    ours, theirs = (checkpoint_tensors(run.folder / "checkpoints" / "latest") for run in (compiled, eager))
    assert ours.keys() == theirs.keys()
