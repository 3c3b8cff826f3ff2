//! What clients ask for, and what they are answered.

/// A request of more bytes than this is refused, up to the end of its head.
pub(crate) const MOST_BYTES: usize = 8 << 10;

/// The answer to a request, apart from the page itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Page,
    Malformed,
    NotFound,
    NotAllowed,
    TooLong,
}

impl Answer {
    /// Of what has arrived so far; `None` if more has to arrive.
    pub(crate) fn to(request: &[u8]) -> Option<Answer> {
        let ends = |end: &[u8]| request.windows(end.len()).position(|bytes| bytes == end);
        match ends(b"\r\n\r\n").or_else(|| ends(b"\n\n")) {
            Some(end) if end <= MOST_BYTES => Some(Answer::to_head(&request[..end])),
            None if request.len() < MOST_BYTES => None,
            _ => Some(Answer::TooLong),
        }
    }

    fn to_head(head: &[u8]) -> Answer {
        let line = head.split(|byte| *byte == b'\n').next().unwrap_or_default();
        let Ok(line) = std::str::from_utf8(line) else { return Answer::Malformed };
        let parts: Vec<&str> = line.trim_end_matches('\r').split(' ').collect();
        let [method, target, version] = parts[..] else { return Answer::Malformed };
        let is_method = !method.is_empty() && method.bytes().all(|byte| byte.is_ascii_uppercase());
        if !is_method || !matches!(version, "HTTP/1.0" | "HTTP/1.1") {
            return Answer::Malformed;
        }
        match (target.split('?').next(), method) {
            (Some("/metrics"), "GET") => Answer::Page,
            (Some("/metrics"), _) => Answer::NotAllowed,
            _ => Answer::NotFound,
        }
    }

    /// The whole response. `page` makes the page.
    pub(crate) fn response(self, content_type: &str, page: impl FnOnce() -> String) -> Vec<u8> {
        let (status, body) = match self {
            Answer::Page => ("200 OK", page()),
            Answer::Malformed => ("400 Bad Request", "this is no request of HTTP/1.1\n".to_owned()),
            Answer::NotFound => ("404 Not Found", "there is nothing but /metrics\n".to_owned()),
            Answer::NotAllowed => ("405 Method Not Allowed", "there is nothing but GET\n".to_owned()),
            Answer::TooLong => {
                ("431 Request Header Fields Too Large", "the request is too long\n".to_owned())
            }
        };
        let content_type = if self == Answer::Page { content_type } else { "text/plain; charset=utf-8" };
        let allow = if self == Answer::NotAllowed { "Allow: GET\r\n" } else { "" };
        let length = body.len();
        format!(
            "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {length}\r\n{allow}Connection: close\r\n\r\n{body}"
        )
        .into_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_get_of_the_page_gets_it() {
        for (line, answer) in [
            ("GET /metrics HTTP/1.1", Answer::Page),
            ("GET /metrics?name=value HTTP/1.0", Answer::Page),
            ("POST /metrics HTTP/1.1", Answer::NotAllowed),
            ("HEAD /metrics HTTP/1.1", Answer::NotAllowed),
            ("GET / HTTP/1.1", Answer::NotFound),
            ("GET /metrics/../etc HTTP/1.1", Answer::NotFound),
            ("GET http://127.0.0.1/metrics HTTP/1.1", Answer::NotFound),
            ("GET /metrics", Answer::Malformed),
            ("GET  /metrics HTTP/1.1", Answer::Malformed),
            ("get /metrics HTTP/1.1", Answer::Malformed),
            ("GET /metrics HTTP/2.0", Answer::Malformed),
            (" ", Answer::Malformed),
        ] {
            for end in ["\r\nHost: a\r\n\r\n", "\r\n\r\n", "\n\n"] {
                assert_eq!(Answer::to(format!("{line}{end}").as_bytes()), Some(answer), "{line}");
            }
            assert_eq!(Answer::to(line.as_bytes()), None, "more may come");
        }
        assert_eq!(Answer::to(b"\xff\xfe\r\n\r\n"), Some(Answer::Malformed));
        assert_eq!(Answer::to(b"\r\n\r\n"), Some(Answer::Malformed));
    }

    #[test]
    fn a_request_without_an_end_is_refused() {
        let request = |bytes: usize| Answer::to(&vec![b'a'; bytes]);
        assert_eq!((request(MOST_BYTES - 1), request(MOST_BYTES)), (None, Some(Answer::TooLong)));
    }

    #[test]
    fn a_response_names_the_length_of_its_body() {
        let response = |answer: Answer| {
            String::from_utf8(answer.response("text/x", || "some text\n".to_owned())).unwrap()
        };
        let page = response(Answer::Page);
        assert!(
            page.starts_with("HTTP/1.1 200 OK\r\nContent-Type: text/x\r\nContent-Length: 10\r\n"),
            "{page}"
        );
        assert!(page.ends_with("\r\nConnection: close\r\n\r\nsome text\n"), "{page}");
        assert!(response(Answer::NotAllowed).contains("\r\nAllow: GET\r\n"));
    }
}
