"""The DETR family: transformers' models with our criteria, one file per architecture."""
