"""Shared core of the tk kernel packages: dispatch, launch, device facts, roofline, timing and reports.

Kernel packages import the modules they need; importing this package imports nothing else.
"""

from importlib.metadata import version as _version

__version__ = _version("tk-kernel-core")
