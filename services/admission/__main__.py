"""`python -m services.admission`."""

from services.admission.app import run

if __name__ == "__main__":
    run()
