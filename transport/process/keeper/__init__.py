"""The keeper of one worker: the guardian that outlives the supervisor, and hands the worker over to the next one."""
