"""Jobs made of one function: requested, submitted and waited for from a program, as `client.submit(JobRequest(...)).wait()`.

Each is a job of one role with one worker, whose process calls the function. A job of several roles is made by `JobBuilder`.
"""
