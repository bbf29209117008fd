"""Scene graphs: relation heads, one file each, on a Faster R-CNN."""
