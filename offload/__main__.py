"""`python -m offload` is the `offload` command."""

from offload.cli import app

if __name__ == "__main__":
    app(prog_name="offload")
