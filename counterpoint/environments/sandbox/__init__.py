"""Runs Python code that a model wrote: without network, files or other processes, within bounds of time, memory and output.

    from counterpoint.environments.sandbox.python_sandbox import Result, Sandbox

    sandbox = Sandbox()                # one for a whole environment; `await sandbox.start()` in the environment's `start`
    result = await sandbox.run(code, stdin="", seconds=10.0, memory_mib=512)
    result.ok, result.stdout, result.stderr, result.exit_code, result.killed, result.seconds
    await sandbox.close()              # in the environment's `close`

`python_sandbox` is the caller's side. It starts `zygote`, an interpreter in namespaces of its own (`namespaces`), which forks a
process for each run. `supervisor` watches that process, and `confined` is what it does before and while it runs the code
(`seccomp` is its filter of system calls). `box` is a root in which commands, with all that they start, leave files for one
another, in phases; `builder` and `phase` are its inside. All but `python_sandbox` and `box` import nothing but the standard
library and `transport/frames.py`.
`docs/environments.md` says what this protects against and what not.
"""
