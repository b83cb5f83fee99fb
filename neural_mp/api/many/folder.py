"""What the folder of a job holds beside `job.json`, and that of all jobs beside their folders."""

#: The saved result, the workspace unless the tuning file names one, and what was printed.
RESULT, WORKSPACE, LOG_FILE = "result", "workspace", "log.txt"
#: The page of all jobs.
SUMMARY_FILE = "index.html"
