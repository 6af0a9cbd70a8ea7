"""Password verifiers made here instead of by the server."""

import base64

from berth.store.migrate import scram_verifier, verifies


def test_the_verifier_is_the_one_of_rfc_7677() -> None:
    # RFC 7677 section 3: user "user", password "pencil"; its proof and signature follow from these two keys.
    verifier = scram_verifier("pencil", base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ=="))
    assert verifier == (
        "SCRAM-SHA-256$4096:W22ZaJ0SNY7soEsUEjb6gQ==$WG5d8oPm3OtcPnkdi4Uo7BkeZkBFzpcXkuLmtbsT4qY="
        ":wfPLwcE6nTWhTAmQ7tl2KeoiWGPlZqQxSrmfPwDl2dU="
    )


def test_only_the_same_password_verifies() -> None:
    verifier = scram_verifier("pencil")
    assert verifies("pencil", verifier)
    assert not verifies("pen", verifier)
    assert not verifies("pencil", "")
    assert not verifies("pencil", "md5abcdef")
    assert scram_verifier("pencil") != verifier
