"""Run one of the programs on a job: ``python -m peer_programs NAME FOLDER``."""

import sys
from importlib import import_module
from pathlib import Path

from peer_programs.job import Job

import_module(f"peer_programs.{sys.argv[1]}").main(Job(Path(sys.argv[2])))
