"""What `sweep.py` and `find_rate.py` see of a training: settings, rows, a status, and its end."""

import fcntl
import json
import math
import os
import signal
import sys
import time
from pathlib import Path

words = [part for word in sys.argv[1:] for part in word.removeprefix("--").split("=", 1)]
given = dict(zip(words, words[1:], strict=False))  # of both `--key value` and `--key=value`
if "print_config" in words:
    print("optim: {lr: 0.01, backbone_lr: 0.001, accumulation_steps: 1}\ndata: {batch_size_per_device: 4}")
    sys.exit()
folder, steps = Path(given["run.output_dir"]) / given["run.name"], int(given.get("run.max_steps", 4))
folder.mkdir(exist_ok=True)
lock = open(folder / ".lock", "w")  # noqa: SIM115 - until the end
fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def end(state: str, code: int) -> None:
    (folder / "status.json").write_text(json.dumps({"state": state}))
    os._exit(code)


signal.signal(signal.SIGTERM, lambda *_: end("preempted", 85))
rate, factor = float(given["optim.lr"]), float(given.get("schedule.final_factor", 1))
best = -abs(math.log10(rate) + 2) + float(given.get("bonus", 0))
with open(folder / "metrics.jsonl", "w") as file:
    for step in range(1, steps + 1):
        time.sleep(float(os.environ.get("SLOW", 0)))
        now = rate * factor ** ((step - 1) / steps)
        loss = 2.0 - min(1.0, now * 100) if now < 0.02 else (now / 0.02) ** 2
        file.write(json.dumps({"step": step, "val/score": best - 1 / step, "train/loss": loss}) + "\n")
        file.flush()
end("failed", 1) if given.get("bonus") == "9" else end("done", 0)
