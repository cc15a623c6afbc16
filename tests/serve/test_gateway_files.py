"""``/v1/files`` with the official client."""

from __future__ import annotations

import base64
from typing import Any

import openai
import pytest
from clips import encode, footage
from gateway_helpers import error_of
from scripted import Deployed, picture_url

from pixelis.serve.keys import KeyFile

pytestmark = pytest.mark.slow

PICTURE = base64.b64decode(picture_url().partition(",")[2])


def uploaded(client: openai.OpenAI, name: str = "a.png", content: bytes = PICTURE, **options: Any) -> Any:
    return client.files.create(**{"file": (name, content), "purpose": "vision", **options})


def complete(client: openai.OpenAI, *parts: Any) -> Any:
    content: Any = [{"type": "text", "text": "say 7"}, *parts]
    asked: Any = [{"role": "user", "content": content}]
    return client.chat.completions.create(model="pixelis-nano", messages=asked)


def test_a_picture_is_uploaded_once_and_asked_about_often(client: openai.OpenAI, deployed: Deployed) -> None:
    file = uploaded(client, "../a picture.png")
    assert (file.filename, file.bytes, file.purpose) == ("a picture.png", len(PICTURE), "vision")
    assert (file.status, file.expires_at is None) == ("processed", False)
    for kind, field in (("image_file", "image_file"), ("file", "file")):
        reply = complete(client, {"type": kind, field: {"file_id": file.id}})
        assert (reply.choices[0].message.content, reply.model_extra["pixelis"]["operations"]) == ("7", 1)
    answered, last = {"role": "assistant", "content": "seven"}, {"role": "user", "content": "recall"}
    for kind in ("input_image", "input_file"):
        parts = [{"type": "input_text", "text": "recall"}, {"type": kind, "file_id": file.id}]
        items: Any = [{"role": "user", "content": parts}, answered, last]
        assert client.responses.create(model="pixelis-nano", input=items).output_text == "seven 1 of 1"
    assert deployed.ask("say 7", image=file.id).json()["answer"] == "7"
    assert client.files.retrieve(file.id).bytes == len(PICTURE)
    assert client.files.content(file.id).content == PICTURE
    assert file.id in [f.id for f in client.files.list()]
    assert client.files.delete(file.id).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            call(file.id)
        assert caught.value.code == "file_not_found"
    assert error_of(deployed.ask("say 7", image=file.id))["code"] == "file_not_found"


def test_a_clip_is_uploaded_and_asked_about(client: openai.OpenAI, deployed: Deployed) -> None:
    clip = encode(footage(count=8, width=64, height=48))
    file = uploaded(client, "a.mp4", clip, purpose="user_data")
    # This gateway shows at most three pictures, and a clip is several: as a clip the file is understood, and
    # refused.
    for kind in ("file", "input_video"):
        with pytest.raises(openai.BadRequestError, match="frames of each clip"):
            complete(client, {"type": kind, kind: {"file_id": file.id}})
    assert error_of(deployed.ask("say 7", image=[], video=file.id))["code"] == "too_many_images"
    refused = deployed.ask("say 7", image=file.id)
    assert (refused.status_code, error_of(refused)["code"]) == (400, "file_type")
    client.files.delete(file.id)


def test_files_are_listed_in_pages(client: openai.OpenAI) -> None:
    ids = [uploaded(client).id for _ in range(3)]
    assert {*ids} <= {f.id for f in client.files.list(limit=2, order="asc")}  # follows the pages
    page = client.files.list(limit=2)
    assert (len(page.data), page.has_more) == (2, True)
    assert client.files.list(purpose="user_data").data == []
    for id in ids:
        client.files.delete(id)


def test_a_file_belongs_to_the_key_that_uploaded_it(
    client: openai.OpenAI, deployed: Deployed, file: KeyFile
) -> None:
    own, other = uploaded(client).id, file.create("files-of-another", ["ask", "read", "steer"])
    with openai.OpenAI(base_url=f"{deployed.url}/v1", api_key=other, max_retries=0) as another:
        assert another.files.list().data == []
        for call in (another.files.retrieve, another.files.delete):
            with pytest.raises(openai.NotFoundError):
                call(own)
    asked = deployed.ask("say 7", key=other, image=own)
    assert (asked.status_code, error_of(asked)["code"]) == (404, "file_not_found")
    assert client.files.delete(own).deleted


@pytest.mark.parametrize(
    ("content", "options", "code"),
    [
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", {}, "file_type"),
        (PICTURE[:40], {}, "image_undecodable"),
        (base64.b64decode(picture_url((1100, 1000), "GIF").partition(",")[2]), {}, "image_too_many_pixels"),
        (b"\0\0\0\x18ftypmp42" + bytes(100), {}, "video_undecodable"),
        (PICTURE, {"purpose": "batch"}, "invalid_value"),
        (PICTURE, {"expires_after": {"anchor": "created_at", "seconds": 60}}, "invalid_value"),
        (PICTURE, {"extra_body": {"colour": "red"}}, "unsupported_parameter"),
    ],
)
def test_what_is_no_upload_is_refused(client: openai.OpenAI, content: bytes, options: Any, code: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        uploaded(client, content=content, **options)
    assert caught.value.code == code


def test_a_large_or_foreign_form_is_refused(client: openai.OpenAI, deployed: Deployed) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        uploaded(client, content=bytes(1_000_001))
    assert (caught.value.status_code, caught.value.code) == (413, "body_too_large")
    form: Any = {"files": {"file": ("a.png", PICTURE)}, "data": {"purpose": "vision"}}
    with deployed.client() as http:
        foreign = http.post("/v1/files", **form, headers={"Origin": "https://evil.example"})
        assert (foreign.status_code, error_of(foreign)["code"]) == (403, "origin_not_allowed")
        own = http.post("/v1/files", **form, headers={"Origin": deployed.url})
        client.files.delete(own.json()["id"])
        assert http.post("/v1/files", json={}).status_code == 415
        headers = {"Content-Type": "multipart/form-data; boundary=x"}
        empty = b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\nabc'
        for body, code in ((b"--x\r\n\r\n", "invalid_form"), (empty, "missing_parameter")):
            broken = http.post("/v1/files", content=body, headers=headers)
            assert (broken.status_code, error_of(broken)["code"]) == (400, code)
