"""What runs in the box. It needs Python 3.10, the standard library and nothing of drumroll: it is carried there as a zip.

Four kinds of processes, each forked from the one before it:

- the *zygote* waits for work with its modules loaded; it never reads a job, so nothing of a run is left for the next;
- a *supervisor* for each run reads the job, starts the others, watches their limits and reports;
- the *program* is the code under test. It is forked before the supervisor has read the tests, and it holds no file but
  its own input, output and, where its functions are called, the link to the examiner;
- the *examiner* runs the tests. The program's functions stand for themselves there, and only plain data crosses.
"""
