//! The thread that serves metrics.

use std::io::{self, PipeReader, PipeWriter, Write};
use std::net::{SocketAddr, TcpListener};
use std::process;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{Shutdown, shutdown};
use ssdtrain::{Meter, TensorCache};

use super::address::Address;
use super::connection::Connection;
use super::error::{Error, Result};
use super::text::{CONTENT_TYPE, text};

/// As many clients are served at once. The next one takes the place of the one that came first.
const MOST_CLIENTS: usize = 32;
/// After the system has refused a connection, such as for lack of file descriptors, none is accepted for so long.
const PAUSE: Duration = Duration::from_secs(1);

/// Serves the metrics of caches at `/metrics`, until it is dropped. It answers nothing else, and asks nobody who they are: an address
/// that other machines can reach shows them the figures.
///
/// Its only thread (`ssdtrain-http`) waits for no single client. A request may have 8 KiB, and its client takes at most five seconds;
/// of many clients, the one that came first has to go. Caches are never kept waiting, and may be dropped meanwhile.
///
/// In a process that was forked off, a server does nothing: it stays with the process that started it.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    /// The process that started it.
    process: u32,
    /// Whatever is written here ends the thread.
    end: PipeWriter,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Serves the metrics of `caches`, each under its name as the label `cache`. Port 0 is any port that is free.
    ///
    /// # Errors
    ///
    /// [`Error::Bind`] if the address cannot be listened at, for example because another program does, [`Error::Name`] if two caches have
    /// one name, [`Error::Thread`] if the system refuses a thread.
    pub fn start(address: impl Into<Address>, caches: &[(&str, &TensorCache)]) -> Result<Server> {
        let mut names: Vec<&str> = caches.iter().map(|(name, _)| *name).collect();
        names.sort_unstable();
        if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Error::Name(pair[0].to_owned()));
        }
        let asked = SocketAddr::from(address.into());
        let bound = |source| Error::Bind { address: asked, source };
        let listener = TcpListener::bind(asked).map_err(bound)?;
        listener.set_nonblocking(true).map_err(bound)?;
        let address = listener.local_addr().map_err(bound)?;
        let (ended, end) = io::pipe().map_err(Error::Thread)?;
        let caches = caches.iter().map(|(name, cache)| ((*name).to_owned(), cache.meter())).collect();
        let mut service = Service { listener, ended, caches, clients: Vec::new(), pauses_until: None };
        let thread = thread::Builder::new().name("ssdtrain-http".to_owned());
        let thread = thread.spawn(move || service.run()).map_err(Error::Thread)?;
        Ok(Server { address, process: process::id(), end, thread: Some(thread) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where the metrics are, for people and for a browser.
    pub fn url(&self) -> String {
        format!("http://{}/metrics", self.address)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // In another process, there is no thread.
        let Some(thread) = self.thread.take().filter(|_| self.process == process::id()) else { return };
        if let Err(error) = self.end.write_all(&[0]) {
            return tracing::error!(%error, "the thread that serves metrics is left behind");
        }
        if thread.join().is_err() {
            tracing::error!("the thread that serves metrics panicked");
        }
    }
}

/// What the thread works with.
struct Service {
    listener: TcpListener,
    ended: PipeReader,
    caches: Vec<(String, Meter)>,
    /// In the order in which they came.
    clients: Vec<Connection>,
    pauses_until: Option<Instant>,
}

impl Service {
    /// Serves until the server is dropped.
    fn run(&mut self) {
        loop {
            match self.wait() {
                Ok(Some(ready)) => self.serve(&ready),
                Ok(None) => break,
                Err(Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "metrics are not served any more");
                    break;
                }
            }
        }
        // A process that was forked off has the socket too, and would go on listening where nobody answers. If this fails, it does.
        _ = shutdown(&self.listener, Shutdown::Both);
    }

    /// Waits until something can be done. Returns whether a client has come, followed by whether each client can go on; `None` once the
    /// server is dropped.
    fn wait(&mut self) -> Result<Option<Vec<bool>>, Errno> {
        let now = Instant::now();
        self.clients.retain(|client| client.deadline > now);
        self.pauses_until = self.pauses_until.filter(|until| *until > now);
        let accepts = if self.pauses_until.is_none() { PollFlags::IN } else { PollFlags::empty() };
        let mut waited_for =
            vec![PollFd::new(&self.ended, PollFlags::IN), PollFd::new(&self.listener, accepts)];
        waited_for.extend(self.clients.iter().map(|client| {
            let flags = if client.writes() { PollFlags::OUT } else { PollFlags::IN };
            PollFd::new(client.stream(), flags)
        }));
        let next = self.clients.iter().map(|client| client.deadline).chain(self.pauses_until).min();
        // A moment longer, so that what is waited for has passed.
        let timeout = next.and_then(|next| Timespec::try_from(next - now + Duration::from_millis(1)).ok());
        poll(&mut waited_for, timeout.as_ref())?;
        let mut ready = waited_for.iter().map(|one| !one.revents().is_empty());
        if ready.next() == Some(true) { Ok(None) } else { Ok(Some(ready.collect())) }
    }

    fn serve(&mut self, ready: &[bool]) {
        let Service { clients, caches, .. } = self;
        let mut goes_on = ready.iter().skip(1);
        clients.retain_mut(|client| {
            // Whoever is not ready stays.
            goes_on.next() != Some(&true)
                || client.proceed(|answer| answer.response(CONTENT_TYPE, || page(caches)))
        });
        if ready.first() == Some(&true) {
            self.accept();
        }
    }

    /// Takes in the clients that have come.
    fn accept(&mut self) {
        for _ in 0..MOST_CLIENTS {
            match self.listener.accept().and_then(|(stream, _)| Connection::new(stream)) {
                Ok(client) => {
                    if self.clients.len() == MOST_CLIENTS {
                        self.clients.remove(0);
                    }
                    self.clients.push(client);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted
                    ) => {}
                Err(error) => {
                    tracing::debug!(%error, "a client that asks for metrics is refused");
                    self.pauses_until = Some(Instant::now() + PAUSE);
                    return;
                }
            }
        }
    }
}

fn page(caches: &[(String, Meter)]) -> String {
    let read: Vec<_> = caches.iter().map(|(name, meter)| (name.as_str(), meter.read())).collect();
    let read: Vec<_> = read.iter().map(|(name, metrics)| (*name, metrics)).collect();
    text(&read)
}
