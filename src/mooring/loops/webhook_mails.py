"""E-mails of webhooks, through the SMTP server of the settings."""

import smtplib
import ssl
from dataclasses import dataclass
from email.message import EmailMessage
from email.utils import formatdate
from typing import Final, Literal

from mooring.loops.webhook_requests import NotSent, ReceiverAnswer

_TIMEOUT_S: Final = 10.0
_LONGEST_SUBJECT: Final = 150


@dataclass(frozen=True, slots=True)
class MailServer:
    """Where e-mails are handed over.

    Attributes:
        security: starttls and tls both verify the server's certificate; none: only on a trusted network.
    """

    host: str
    port: int
    sender: str
    user: str | None = None
    password: str | None = None
    security: Literal["starttls", "tls", "none"] = "starttls"


def send(server: MailServer, to: str, message_id: str, text: str) -> ReceiverAnswer:
    """Send an e-mail. Blocks for some seconds.

    Raises:
        NotSent: the server cannot be reached, or has no TLS although the settings require it.
    """
    message = _message(server, to, message_id, text)
    tls = ssl.create_default_context()
    try:
        if server.security == "tls":
            connection: smtplib.SMTP = smtplib.SMTP_SSL(
                server.host, server.port, timeout=_TIMEOUT_S, context=tls
            )
        else:
            connection = smtplib.SMTP(server.host, server.port, timeout=_TIMEOUT_S)
        with connection:
            if server.security == "starttls":
                _start_tls(connection, tls)
            if server.user is not None:
                connection.login(server.user, server.password or "")
            connection.send_message(message)
    except smtplib.SMTPRecipientsRefused as error:
        code = next(iter(error.recipients.values()))[0]
        return ReceiverAnswer(int(code), None)
    except smtplib.SMTPResponseException as error:
        return ReceiverAnswer(int(error.smtp_code), None)
    except ssl.SSLError:
        raise NotSent("tls_failed") from None
    except TimeoutError:
        raise NotSent("timeout") from None
    except (OSError, smtplib.SMTPException):
        raise NotSent("connection_failed") from None
    return ReceiverAnswer(250, None)


def _start_tls(connection: smtplib.SMTP, tls: ssl.SSLContext) -> None:
    """Raises NotSent: the server has no TLS, so nothing is sent."""
    try:
        connection.starttls(context=tls)
    except smtplib.SMTPNotSupportedError:
        raise NotSent("tls_failed") from None


def _message(server: MailServer, to: str, message_id: str, text: str) -> EmailMessage:
    """The same Message-ID in each attempt, so that a repeated e-mail can be recognized."""
    line = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    message = EmailMessage()
    message["From"], message["To"] = server.sender, to
    message["Subject"] = f"[Mooring] {line[:_LONGEST_SUBJECT]}"
    message["Date"] = formatdate(usegmt=True)
    message["Message-ID"] = f"<{message_id}@mooring>"
    message["Auto-Submitted"] = "auto-generated"
    message.set_content(
        f"{line}\n\nA webhook of your project names this address. The owners of the project can change it.\n"
    )
    return message
