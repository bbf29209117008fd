"""The toolkit: scripts -> session -> training, validation -> data, models, evaluation, use -> step, runs -> the rest.

The loose files stand below everything: attributes, batch, boxes, distributed, errors, extras, files, modes,
offline, signals. detect is the command of that name. docs/design.md has the map, and tests/test_layout.py holds the
arrows.
"""
