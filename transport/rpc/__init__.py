"""Asks and answers between two processes: messages over a framed stream, or over TCP with keys, each with one deadline.

`connection.py` has what is asked and answered, `stream.py` and `curve.py` what carries it. `loop_thread.py` is for plain threads.
"""
