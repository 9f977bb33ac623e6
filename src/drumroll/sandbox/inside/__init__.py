"""The code that runs inside a box. It needs Python 3.10 and the standard library; it is copied there as a zip.

Four kinds of processes, each forked from an earlier one:

- the *zygote* waits for work with its modules loaded. It never reads a job, so nothing of a run is left for the next;
- a *supervisor* for each run reads the job, starts the other processes, enforces their limits and reports;
- the *program* is the code under test. It is forked before the supervisor reads the tests, and its only open files are
  its input, its output and, if its functions are called, the link to the examiner;
- the *examiner* runs the tests. Stubs stand for the program's functions there, and only plain data crosses the link.
"""
