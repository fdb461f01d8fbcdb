"""`python -m headrace_deploy` is the program `headrace`."""

from headrace_deploy.entry import main

if __name__ == "__main__":
    main()
