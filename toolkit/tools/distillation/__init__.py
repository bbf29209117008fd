"""Knowledge distillation from a trained teacher."""
