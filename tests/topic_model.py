"""The topic model, which lies with its dataset: `datasets/topics/topics.py` and its charts, as modules."""

from kit.registry import load_file

topics = load_file("datasets/topics/topics.py")
charts = load_file("datasets/topics/charts.py")
