"""The web page and the admin API of one or many jobs (`counterpoint serve`).

A process of its own, which reads what the jobs' processes publish in their directories and leaves requests there
(`counterpoint/run/requests.py`). Training neither waits for it nor connects to it.
"""
