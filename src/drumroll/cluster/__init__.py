"""Roles and the worker groups that play them. Every call to a model goes through a group."""
