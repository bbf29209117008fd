"""The toolkit. Scripts use session; session uses training and validation; those use data, models, evaluation and use,
which build on step, runs and the loose files.

The loose files below everything are batch, boxes, box_ops, distributed, draws, errors, files, imports, signals, text
and trust; detect is the command of that name. docs/design.md has the map, and tests/test_layout.py checks who may
import whom.
"""
