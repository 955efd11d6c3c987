"""doctor --cpu: what it computes, against computations by hand in one process."""

import os
import sys

import pytest
from conftest import run
from played import ROOT

SCRIPT = ROOT / "tests/doctor/modes"
