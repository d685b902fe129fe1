"""A root file system out of this host, and a program in a box that sees that and nothing else of it."""

import json
import subprocess
import sys

import ringfence

build = [sys.executable, "-m", "ringfence.cli.main", "image", "build", "--json"]
image = json.loads(subprocess.run(build, stdout=subprocess.PIPE, check=True).stdout)
PROGRAM = """
import os, sys
print("python:", sys.executable)
print("top:", *sorted(os.listdir("/")))
"""
execution = ringfence.run_code(PROGRAM, image=image["digest"])
print(execution.text, end="")
print("the image that it ran in:", execution.facts["isolation"]["image"]["digest"] == image["digest"])
