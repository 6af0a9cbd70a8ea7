"""`python -m services.gateway`."""

from services.gateway.app import run

if __name__ == "__main__":
    run()
