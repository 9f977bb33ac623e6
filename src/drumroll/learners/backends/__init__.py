"""Training backends, a file each. Importing this package registers the built-in ones."""

from drumroll.learners.backends import torch as torch

__all__ = ["torch"]
