"""What a job's directory says, as typed values: page, commands, sinks and `counterpoint.read` take them from here. Read only.

Reading is incremental and bounded. Anybody may have written what is read.
"""
