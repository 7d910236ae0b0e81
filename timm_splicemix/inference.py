""" Old name of `load_model`, until 0.3; `timm_splicemix.load_checkpoint` replaces it """
from .run.load import load_model

__all__ = ['load_model']
