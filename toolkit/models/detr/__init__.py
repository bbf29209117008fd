"""The DETR family: transformers' models, our criteria; one file an architecture."""
