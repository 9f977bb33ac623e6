"""Python runs this at its start if the folder is on PYTHONPATH: Megatron-Core then finds a CPU in the place of CUDA.

Whole runs of tests set PYTHONPATH (`megatron_on_cpu.environment`), and their processes, also those of Ray, inherit it.
Nothing happens in a process that does not import Megatron-Core.
"""

import importlib.abc
import importlib.util
import sys
from pathlib import Path


class AfterMegatron(importlib.abc.MetaPathFinder):
    """Lets `megatron_on_cpu` change torch as soon as `megatron.core` is there."""

    def find_spec(self, name, path, target=None):
        if name != "megatron.core":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            sys.path.append(str(Path(__file__).parents[1]))
            import megatron_on_cpu

            megatron_on_cpu.install()

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, AfterMegatron())
