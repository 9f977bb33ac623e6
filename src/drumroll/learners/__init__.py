"""Learners train: one update loop (`learner`), any backend (`backends/`), any head (`heads`), on a mesh of ranks (`ranks`)."""

from drumroll.learners.learner import Aggregation, Learner, Update
from drumroll.learners.statistics import Metrics, Statistics

__all__ = ["Aggregation", "Learner", "Metrics", "Statistics", "Update"]
